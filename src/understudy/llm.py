"""The Python interface.

from understudy import LLM, SamplingParams
llm = LLM()                                   # the embedded model
print(llm.generate("Once upon a time", SamplingParams(temperature=0))[0].text)
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy.assembly import Target, build_engine, load_configured
from understudy.config import EngineConfig
from understudy.core.events import EventSink, log_fallbacks
from understudy.core.request import Completion, Output, Request, Result, SamplingParams, Speculation
from understudy.engine.sequence import Sequence as RunningSequence
from understudy.errors import ConfigError, InvalidRequest
from understudy.text.chat import render

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model and its engine in this process. Several threads may use one: their requests share its steps."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        target: Target | None = None,
        emit: EventSink = log_fallbacks,
        progress: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        """Load `model` (None: the embedded one). Settings are those of EngineConfig, by name or as a whole."""
        if config is not None and settings:
            raise ConfigError("Both a config and single settings were given.", "Give one of the two.")
        config = config or EngineConfig.from_mapping(settings)
        self.target = target or load_configured(model, config, emit=emit, progress=progress)
        self.engine = build_engine(self.target, config, emit=emit)
        self._system_fingerprint = self.target.system_fingerprint
        self._request_numbers = itertools.count()
        self._lock = threading.Lock()  # around the engine, which knows nothing of threads
        self._inbox: dict[str, deque[Output]] = {}  # what requests said and nobody has taken yet

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        tenant: str = "",
        workload_class: str = "other",
        on_output: Callable[[Output], None] | None = None,
    ) -> list[Result]:
        """Continue prompts (one text, or several texts or lists of ids); `on_output` sees the words as they come."""
        requests = [
            self.request(
                prompt,
                sampling,
                speculation=speculation,
                tenant=tenant,
                workload_class=workload_class,
            )
            for prompt in ([prompts] if isinstance(prompts, str) else prompts)
        ]
        return self.run(requests, on_output=on_output)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        on_output: Callable[[Output], None] | None = None,
    ) -> Result:
        """Answer a conversation: messages of {"role", "content"}."""
        request = self.request(self.chat_ids(messages), sampling, speculation=speculation)
        return self.run([request], on_output=on_output)[0]

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Render a conversation with the model's template and turn it into token ids."""
        tokenizer = self.target.tokenizer
        if tokenizer.chat_template is None:
            raise InvalidRequest("This model has no chat template.", "Use generate() with a plain prompt.")
        text = render(
            tokenizer.chat_template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
        )  # fmt: skip
        return tokenizer.encode(text, add_special=False)

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        tenant: str = "",
        workload_class: str = "other",
    ) -> Request:
        """Make a request of a prompt."""
        return Request(
            request_id=f"request-{next(self._request_numbers)}",
            prompt_ids=_ids(self.target.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt),
            sampling=sampling or SamplingParams(),
            speculation=speculation or Speculation(),
            tenant=tenant,
            workload_class=workload_class,
        )

    def run(
        self,
        requests: Iterable[Request],
        *,
        on_output: Callable[[Output], None] | None = None,
        concurrency: int | None = None,
    ) -> list[Result]:
        """Serve requests, at most `concurrency` at once, and return their results in order.

        Nothing is left behind: if a request is refused or the caller interrupts, all that were running are aborted.
        """
        if concurrency is not None and concurrency < 1:
            raise InvalidRequest(f"concurrency is {concurrency}.", "Give at least 1.", parameter="concurrency")
        requests = list(requests)
        if len({request.request_id for request in requests}) < len(requests):
            raise InvalidRequest("Two requests have the same id.", "Give each its own.", parameter="request_id")
        sequences: dict[str, list[RunningSequence]] = {}
        running: dict[str, list[RunningSequence]] = {}
        results: dict[str, Result] = {}
        queue = iter(requests)
        try:
            while True:
                while concurrency is None or len(running) < concurrency:
                    request = next(queue, None)
                    if request is None:
                        break
                    sequences[request.request_id] = running[request.request_id] = self._submit(request)
                    results[request.request_id] = _empty_result(request, sequences[request.request_id])
                if not running:
                    break
                for output in self._step(running):
                    _extend(results[output.request_id], output)
                    if on_output is not None:
                        on_output(output)
                for request_id in self._done(running):
                    del running[request_id]
        finally:
            self._leave(sequences)
        for request_id, ended in sequences.items():
            _complete(results[request_id], ended)
            results[request_id].system_fingerprint = self._system_fingerprint
        return [results[request.request_id] for request in requests]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Output]:
        """Yield the words of one prompt as they come; closing the iterator aborts the request."""
        request = self.request(prompt, sampling)
        running = self._submit(request)
        try:
            while not self._done({request.request_id: running}):
                yield from self._step([request.request_id])
        finally:
            self._leave([request.request_id])

    def _submit(self, request: Request) -> list[RunningSequence]:
        with self._lock:
            running = self.engine.submit(request)
            self._inbox[request.request_id] = deque()
        return running

    def _step(self, request_ids: Iterable[str]) -> Iterator[Output]:
        """Yield what these requests said; only if that is nothing yet, let the engine compute a step."""
        mine = [self._inbox[request_id] for request_id in request_ids]
        with self._lock:
            for output in () if any(mine) else self.engine.step():
                if output.request_id in self._inbox:  # whoever waits for another request finds it there
                    self._inbox[output.request_id].append(output)
        for inbox in mine:
            while inbox:
                yield inbox.popleft()

    def _done(self, running: Mapping[str, list[RunningSequence]]) -> list[str]:
        """Those requests that ended, all their words taken; another thread's step may have ended them."""
        with self._lock:
            return [
                request_id
                for request_id, sequences in running.items()
                if all(sequence.finish_reason is not None for sequence in sequences) and not self._inbox[request_id]
            ]

    def _leave(self, request_ids: Iterable[str]) -> None:
        """Let go of requests; those that were not finished are aborted, and their blocks are free at once."""
        with self._lock:
            for request_id in request_ids:
                self.engine.abort(request_id)
                del self._inbox[request_id]
            self.engine.end_aborted()


def _ids(prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in prompt)
    except TypeError:
        raise InvalidRequest("A prompt is a text or a list of token ids.", parameter="prompt") from None


def _empty_result(request: Request, running: Sequence[RunningSequence]) -> Result:
    choices = [Completion(index) for index in range(len(running))]
    return Result(request.request_id, request.prompt_ids, running[0].context.noise.seed, choices)


def _extend(result: Result, output: Output) -> None:
    choice = result.completions[output.choice]
    choice.token_ids.extend(output.token_ids)
    choice.text += output.text
    choice.logprobs.extend(output.logprobs)
    choice.sources.extend(output.sources)
    choice.finish_reason = output.finish_reason
    choice.stop_reason = output.stop_reason
    choice.error = output.error


def _complete(result: Result, running: Sequence[RunningSequence]) -> None:
    result.cached_tokens = running[0].cached_tokens
    result.num_preemptions = sum(sequence.num_preemptions for sequence in running)
    for completion, sequence in zip(result.completions, running, strict=True):
        completion.speculation = sequence.counts
