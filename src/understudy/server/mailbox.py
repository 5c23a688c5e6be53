"""What a request said and its reader has not taken yet: bounded, and joined while it waits.

An engine does not wait for readers. Outputs of one choice that nobody took are joined into one, so a slow reader costs
no more than the text itself; one that falls too far behind is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from understudy.core.backend import Taker
from understudy.core.request import Output
from understudy.errors import SlowReader

MOST_WAITING_TOKENS = 8192
"""Tokens that may wait for their reader."""


class Mailbox:
    """The outputs of one request on their way from the engine to whoever reads them."""

    def __init__(self, num_choices: int, on_overflow: Callable[[], None]) -> None:
        self._outputs: dict[int, Output] = {}  # by choice, in order of arrival
        self._num_running = num_choices
        self._num_unended = num_choices
        self._num_tokens = 0
        self._error: Exception | None = None
        self._on_overflow = on_overflow
        self._reader: asyncio.Future[None] | None = None
        self.taker: Taker | None = None
        """Has what comes while the reader waits, if it takes it, but never the last of a choice."""

    def put(self, output: Output) -> None:
        """Take what a choice said in a step. After an error nothing more is taken: the error is the last word."""
        if self._error is not None:
            return
        if self._is_taken(output):
            return
        self._num_unended -= output.finish_reason is not None
        before = self._outputs.get(output.choice)
        self._outputs[output.choice] = output if before is None else _joined(before, output)
        self._num_tokens += len(output.token_ids)
        if self._num_tokens > MOST_WAITING_TOKENS:
            self._on_overflow()
            self.fail(SlowReader("The answer was read too slowly.", "Read the stream as it comes."))
        self._wake()

    def fail(self, error: Exception) -> None:
        """Let the reader know that nothing more will come."""
        self._error = error
        self._wake()

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended and all of it was taken."""
        return not self._num_running

    @property
    def is_expecting(self) -> bool:
        """Whether the engine still has something to say for it, however much of what it said is unread."""
        return self._error is None and self._num_unended > 0

    async def take(self) -> Output:
        """Wait for the next output. What was said before an error is given first."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        choice = next(iter(self._outputs))
        output = self._outputs.pop(choice)
        self._num_tokens -= len(output.token_ids)
        if output.finish_reason is not None:
            self._num_running -= 1
        return output

    def _is_taken(self, output: Output) -> bool:
        """Offer an output to the taker. Only while the reader waits for more has it passed on all that came before."""
        if self.taker is None or output.finish_reason is not None or self._reader is None or self._reader.done():
            return False
        try:
            return self.taker(output)
        except Exception as error:  # the reader's, who raises it; others that the engine speaks to must not suffer
            self.fail(error)
            return True

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _joined(first: Output, second: Output) -> Output:
    return second._replace(
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
        sources=first.sources + second.sources,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )
