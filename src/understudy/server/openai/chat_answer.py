"""How a choice of /v1/chat/completions looks: a message, its tool calls, and in streams what is added to them."""

from __future__ import annotations

from collections.abc import Sequence

from understudy.core.request import Output, TokenLogprob
from understudy.server.openai.answers import encode
from understudy.server.openai.logprobs import chat_logprobs
from understudy.server.openai.order import Order
from understudy.server.openai.tools import ToolCall, ToolReader
from understudy.text.tokenizer import Tokenizer


class ChatAnswer:
    """A Shape."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, order: Order, tokenizer: Tokenizer) -> None:
        self._order = order
        self._tokenizer = tokenizer
        self.is_plain = order.tools is None and order.num_logprobs is None and not order.has_token_ids
        self._readers = [self._reader() for _ in range(order.num_choices)]

    def openings(self) -> list[bytes]:
        """Every choice begins by saying whose words they are."""
        delta = b'{"role":"assistant","content":"","refusal":null}'
        return [_chunk(place, delta) for place in range(self._order.num_choices)]

    def chunks(self, place: int, output: Output) -> list[bytes]:
        """Text as it comes, each tool call whole, and at the end the reason for it."""
        text = shown_text(self._order, output)
        if self.is_plain:
            pieces = [_chunk(place, b'{"content":' + encode(text) + b"}")] if text else []
        else:
            pieces = self._detailed(place, output, text)
        if output.finish_reason is not None:
            reason = self._finish_reason(output, self._readers[place])
            pieces.append(_chunk(place, b"{}", finish=_finish(reason, output.stop_reason)))
        return pieces

    def around_words(self, place: int) -> tuple[bytes, bytes]:
        """What a chunk of text and nothing else has before and after the text."""
        before, after = _chunk(place, b'{"content":\0}').split(b"\0")
        return before, after

    def choice(self, place: int, outputs: Sequence[Output]) -> dict[str, object]:
        """The message that all the outputs make."""
        order, last = self._order, outputs[-1]
        text = "".join(shown_text(order, output) for output in outputs)
        reader = self._reader()
        parts = [text] if reader is None else [*reader.add(text), *reader.finish()]
        calls = [part.fields() for part in parts if isinstance(part, ToolCall)]
        content = "".join(part for part in parts if isinstance(part, str))
        message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        return {
            "index": place,
            "message": {**message, "tool_calls": calls} if calls else message,
            "logprobs": self._logprobs([entry for output in outputs for entry in output.logprobs]),
            "finish_reason": self._finish_reason(last, reader),
            "stop_reason": last.stop_reason,
            **({"token_ids": [token for o in outputs for token in o.token_ids]} if order.has_token_ids else {}),
        }

    def extra(self) -> dict[str, object]:
        """The prompt's ids, if ids are wanted."""
        return {"prompt_token_ids": self._order.requests[0].prompt_ids} if self._order.has_token_ids else {}

    def _reader(self) -> ToolReader | None:
        return None if self._order.tools is None else ToolReader(only_one=self._order.tools.only_one)

    def _detailed(self, place: int, output: Output, text: str) -> list[bytes]:
        """The same with tools, log probabilities or ids: the first piece carries what belongs to the tokens."""
        reader = self._readers[place]
        parts: list[str | ToolCall] = [text] if text else []
        if reader is not None:
            first_call = reader.num_calls
            parts = reader.add(text)
            if output.finish_reason is not None:
                parts += reader.finish()
        deltas = []
        for part in parts:
            if isinstance(part, str):
                deltas.append(b'{"content":' + encode(part) + b"}")
            else:
                deltas.append(encode({"tool_calls": [{"index": first_call, **part.fields()}]}))
                first_call += 1
        if not deltas and output.token_ids and (output.logprobs or self._order.has_token_ids):
            deltas.append(b'{"content":""}')
        details = self._details(output)
        return [_chunk(place, delta, **(details if not number else {})) for number, delta in enumerate(deltas)]

    def _details(self, output: Output) -> dict[str, bytes]:
        details = {"logprobs": encode(self._logprobs(output.logprobs))}
        if self._order.has_token_ids:
            details["more"] = b',"token_ids":' + encode(output.token_ids)
        return details

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, object] | None:
        num_top = self._order.num_logprobs
        return None if num_top is None else chat_logprobs(self._tokenizer, entries, num_top)

    @staticmethod
    def _finish_reason(output: Output, reader: ToolReader | None) -> str | None:
        is_call = reader is not None and reader.num_calls and output.finish_reason == "stop"
        return "tool_calls" if is_call else output.finish_reason


def shown_text(order: Order, output: Output) -> str:
    """An output's text, with the stop string that ended it if that is wanted."""
    if order.keeps_stop and isinstance(output.stop_reason, str) and output.finish_reason == "stop":
        return output.text + output.stop_reason
    return output.text


def _finish(reason: str | None, stop_reason: int | str | None) -> bytes:
    return encode(reason) + b',"stop_reason":' + encode(stop_reason)


def _chunk(place: int, delta: bytes, *, logprobs: bytes = b"null", finish: bytes = b"null", more: bytes = b"") -> bytes:
    return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (place, delta, logprobs, finish, more)
