"""How good a draft is where it serves: tokens per cycle and acceptance by position, by class, temperature and shape.

Every arm writes the answers to the same prompts with the engine that serves, forced to draft at each step as deep as
the draft goes: what would pay does not matter here. Whatever is drafted, the words must be those of an engine without
drafts, and are compared.

    chain       one guess after the other
    tree        best first, of several children at each place, within the rows
    uncoupled   the same tree, its children chosen without the noise that the target draws its words with

A draft that is a model has chains alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from understudy.assembly import Target, TrainedDraft, build_engine, make_drafter
from understudy.config import MODEL, EngineConfig
from understudy.core.events import EventSink, log_fallbacks
from understudy.core.request import Completion, Output, Request, SamplingParams, Speculation
from understudy.drafters.base import Drafter
from understudy.drafters.tree import Shape
from understudy.llm import LLM

Item = TypeVar("Item")
Ids = tuple[int, ...]
Watcher = Callable[[], None]
"""Told of each answer that was written."""

SHAPES: Mapping[str, Shape] = {
    "chain": Shape(1),
    "tree": Shape(4),
    "uncoupled": Shape(4, is_coupled=False),
}
NUM_ROWS = 24
"""Rows of a draft, at most."""
_NUM_TOGETHER = 8
"""Texts that are written at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to draft."""

    shape: str
    """One of SHAPES."""
    temperature: float
    max_depth: int
    max_rows: int = NUM_ROWS
    beside: tuple[str, ...] = ()
    """Drafters whose branches are merged into the draft's, as in serving."""


@dataclass(slots=True)
class Tally:
    """What one arm did with the prompts of one class."""

    num_words: int = 0
    num_cycles: int = 0
    num_rows: int = 0
    num_same: int = 0
    """Answers whose words are those of an engine without drafts."""
    num_answers: int = 0
    reached: list[int] = field(default_factory=list)
    """[positions] how often a drafted position was come to: all before it were right, and the text went on"""
    matched: list[int] = field(default_factory=list)
    """[positions] how often it was right, too"""

    def add(self, answer: Completion, plain: Completion) -> None:
        """Count an answer but for its first word, which comes from reading the prompt: nothing was drafted yet."""
        counts = answer.speculation
        self.num_words += len(answer.token_ids) - 1
        self.num_cycles += counts.cycles - 1
        self.num_rows += counts.rows
        self.num_answers += 1
        self.num_same += answer.token_ids == plain.token_ids
        self.reached = _added(self.reached, counts.reached_by_position)
        self.matched = _added(self.matched, counts.matched_by_position)

    @property
    def tokens_per_cycle(self) -> float:
        """Words that a pass of the target brings."""
        return self.num_words / max(self.num_cycles, 1)

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        return {
            "tokens_per_cycle": self.tokens_per_cycle,
            "rows_per_cycle": self.num_rows / max(self.num_cycles, 1),
            "cycles": self.num_cycles,
            "acceptance_by_position": [
                matched / reached for matched, reached in zip(self.matched, self.reached, strict=True) if reached
            ],
            "num_answers": self.num_answers,
            "num_same": self.num_same,
        }


def _added(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in itertools.zip_longest(left, right, fillvalue=0)]


@dataclass(frozen=True, slots=True)
class _Room:
    """What a draft on a GPU must know of its target's runner."""

    num_blocks: int


class Evaluation:
    """The same prompts for every arm and every draft. What the target says without drafts is written once."""

    def __init__(
        self,
        target: Target,
        prompts: Mapping[str, Sequence[Ids]],
        *,
        max_tokens: int,
        watcher: Watcher | None = None,
        emit: EventSink = log_fallbacks,
    ) -> None:
        """Take prompts by class."""
        self._target = target
        self._prompts = [(name, number, ids) for name, asked in prompts.items() for number, ids in enumerate(asked)]
        self._max_tokens = max_tokens
        self._watcher = watcher
        self._emit = emit
        longest = max((len(ids) for _, _, ids in self._prompts), default=0) + max_tokens
        # no more than the texts take: a GPU's memory may hold what was trained, too
        self._num_blocks = _NUM_TOGETHER * (-(-(longest + NUM_ROWS) // target.page_tokens) + 1)
        self._config = EngineConfig(
            drafters=(),
            max_sequences=_NUM_TOGETHER,
            max_context=min(longest, target.decoder.config.max_positions),
            kv_tokens=self._num_blocks * target.page_tokens,
            prefix_cache=False,
        )
        self._plain: dict[float, list[Completion]] = {}

    def measure(self, drafted: Target, arm: Arm) -> dict[str, Tally]:
        """Answer all prompts with the draft that was put beside the target; what came of it, by class."""
        assert drafted.decoder is self._target.decoder, "this draft stands beside another target"
        if arm.temperature not in self._plain:
            llm = LLM(target=self._target, config=self._config, emit=self._emit)
            self._plain[arm.temperature] = self._answers(llm, arm.temperature, Speculation(enabled=False))
        llm = LLM(target=self._target, config=self._config, emit=self._emit)
        drafter = self._drafter(drafted, SHAPES[arm.shape])
        beside = [make_drafter(name, drafted, num_blocks=self._num_blocks) for name in arm.beside]
        llm.engine = build_engine(self._target, self._config, drafters=[drafter, *beside], emit=self._emit)
        forced = Speculation(forced=True, max_depth=arm.max_depth, max_rows=arm.max_rows)
        tallies: dict[str, Tally] = {}
        said = self._answers(llm, arm.temperature, forced)
        for (name, _, _), answer, plain in zip(self._prompts, said, self._plain[arm.temperature], strict=True):
            tallies.setdefault(name, Tally()).add(answer, plain)
        return tallies

    def _drafter(self, drafted: Target, shape: Shape) -> Drafter:
        """The drafter that would serve on the target's device."""
        draft, decoder = drafted.draft, drafted.decoder
        if not isinstance(draft, TrainedDraft):
            assert shape.num_children == 1, "a model drafts chains"
            return make_drafter(MODEL, drafted, num_blocks=self._num_blocks)
        if drafted.device == "cuda":
            from understudy.drafters.trained_cuda import make_trained_drafter_on_device

            return make_trained_drafter_on_device(draft.trained, _Room(self._num_blocks), decoder, shape=shape)
        from understudy.drafters.trained import make_trained_drafter

        return make_trained_drafter(draft.trained, decoder, shape=shape)

    def _answers(self, llm: LLM, temperature: float, speculation: Speculation) -> list[Completion]:
        requests = [
            Request(
                request_id=f"{name} {number}",
                prompt_ids=ids,
                sampling=SamplingParams(temperature=temperature, max_tokens=self._max_tokens, seed=number),
                speculation=speculation,
                tenant=f"{name} {number}",
                workload_class=name,
            )
            for name, number, ids in self._prompts
        ]

        def told(output: Output) -> None:
            if output.finish_reason is not None and self._watcher is not None:
                self._watcher()

        return [result.completions[0] for result in llm.run(requests, on_output=told, concurrency=_NUM_TOGETHER)]


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """So many of the items at most, from all over them: kinds of question may follow one another."""
    return list(items[:: max(1, len(items) // count)][:count])


def describe(arm: Arm, tallies: Mapping[str, Tally]) -> dict[str, Any]:
    """Every class, and the mean over classes of tokens per cycle."""
    rates = [tally.tokens_per_cycle for tally in tallies.values()]
    return {
        "shape": "+".join((arm.shape, *arm.beside)),
        "temperature": arm.temperature,
        "mean_tokens_per_cycle": sum(rates) / len(rates) if rates else None,
        "classes": {name: tally.describe() for name, tally in sorted(tallies.items())},
    }
