"""How a choice of /v1/completions looks: a text, perhaps with the prompt before it, and its log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from understudy.core.request import Output
from understudy.server.openai.answers import encode
from understudy.server.openai.chat_answer import shown_text
from understudy.server.openai.logprobs import CompletionLogprobs, joined
from understudy.server.openai.order import Order
from understudy.text.tokenizer import Tokenizer


class CompletionAnswer:
    """A Shape. Choices are counted prompt by prompt."""

    object_name = chunk_name = "text_completion"

    def __init__(self, order: Order, tokenizer: Tokenizer) -> None:
        self._order = order
        self._tokenizer = tokenizer
        num_places = len(order.requests) * order.num_choices
        num_top = order.num_logprobs
        self._logprobs = (
            [CompletionLogprobs(tokenizer, num_top) for _ in range(num_places)] if num_top is not None else []
        )
        self._unopened = set(range(num_places))
        self.is_plain = num_top is None and not order.has_token_ids and not order.texts

    def openings(self) -> list[bytes]:
        """A stream begins with its first words."""
        return []

    def chunks(self, place: int, output: Output) -> list[bytes]:
        """Text as it comes, the last of it with the reason for the end."""
        fields = self._fields(place, output)
        if not (fields["text"] or fields["logprobs"] or fields.get("token_ids") or output.finish_reason):
            return []
        if output.finish_reason is not None:
            fields["stop_reason"] = output.stop_reason
        return [encode({"index": place, **fields})]

    def around_words(self, place: int) -> tuple[bytes, bytes]:
        """What a chunk of text and nothing else has before and after the text."""
        return b'{"index":%d,"text":' % place, b',"logprobs":null,"finish_reason":null}'

    def choice(self, place: int, outputs: Sequence[Output]) -> dict[str, object]:
        """The text that all the outputs make."""
        pieces = [self._fields(place, output) for output in outputs]
        whole = {"index": place, **pieces[0], "text": "".join(str(piece["text"]) for piece in pieces)}
        logprobs = [piece["logprobs"] for piece in pieces if isinstance(piece["logprobs"], dict)]
        for piece in logprobs[1:]:
            logprobs[0] = joined(logprobs[0], piece)
        whole["logprobs"] = logprobs[0] if logprobs else None
        if self._order.has_token_ids:
            whole["token_ids"] = [token for piece in pieces for token in cast(tuple[int, ...], piece["token_ids"])]
        return {**whole, "finish_reason": pieces[-1]["finish_reason"], "stop_reason": outputs[-1].stop_reason}

    def extra(self) -> dict[str, object]:
        """Nothing: the prompts' ids belong to their choices."""
        return {}

    def _fields(self, place: int, output: Output) -> dict[str, object]:
        """What an output adds. The first of a choice has the prompt before it, if that is to be repeated."""
        order, number = self._order, place // self._order.num_choices
        request = order.requests[number]
        is_first = place in self._unopened
        self._unopened.discard(place)
        text = "" if order.is_echo_only else shown_text(order, output)
        if is_first and order.texts:
            text = order.texts[number] + text
        fields: dict[str, object] = {
            "text": text,
            "logprobs": self._logprobs_of(place, output, echoed=request.prompt_ids[0] if is_first else None),
            "finish_reason": "length" if order.is_echo_only else output.finish_reason,
        }
        if order.has_token_ids:
            if is_first:
                fields["prompt_token_ids"] = request.prompt_ids
            fields["token_ids"] = () if order.is_echo_only else output.token_ids
        return fields

    def _logprobs_of(self, place: int, output: Output, *, echoed: int | None) -> dict[str, list[object]] | None:
        """Log probabilities of an output; `echoed` is the prompt's first token where the prompt stands before it."""
        if not self._logprobs:
            return None
        writer, order = self._logprobs[place], self._order
        pieces = []
        if echoed is not None and order.texts:
            pieces.append(writer.of_prompt(echoed, output.prompt_logprobs))
        if not order.is_echo_only:
            pieces.append(writer.of_answer(output.logprobs))
        if not pieces:
            return None
        return pieces[0] if len(pieces) == 1 else joined(*pieces)
