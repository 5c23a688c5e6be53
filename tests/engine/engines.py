"""Tiny targets, engines without profiling, and what an engine answers."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tiny_models import TinyArchitecture, write_tiny_model
from understudy.assembly import Target, build_engine, load_target
from understudy.config import EngineConfig
from understudy.control.cost import CostModel, Load
from understudy.core.events import Event
from understudy.core.request import Output, Request, TokenLogprob
from understudy.core.weights import WeightType
from understudy.drafters.base import Drafter
from understudy.engine.engine import Engine

PAGE = 32
EOS_IDS = [2, 61, 140, 251]


ARCHITECTURES: dict[TinyArchitecture, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 24},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}
"""The settings of each tiny model: windows shorter than a page, and shorter than a draft."""


@functools.cache
def tiny_target(architecture: TinyArchitecture, weights: WeightType = "fp32") -> Target:
    """One tiny model for the whole session; untied embeddings keep its text varied at temperature 0."""
    settings = ARCHITECTURES[architecture]
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(
            Path(folder), architecture, seed=5, tie_word_embeddings=False, eos_token_id=EOS_IDS, **settings
        )
        return load_target(folder, weights=weights, num_threads=1)


class FixedCost(CostModel):
    """A cost model that live steps do not correct, so that a seed repeats a run."""

    def observe(self, load: Load, seconds: float, base: Load | None = None) -> None:
        """Learn nothing."""


def free_rows() -> CostModel:
    """Rows cost next to nothing: the policy buys whatever may be right."""
    return FixedCost({1: 1.0, 1024: 1.001})


def new_engine(
    target: Target,
    *,
    drafters: Sequence[Drafter] = (),
    cost: CostModel | None = None,
    emit: Callable[[Event], None] = lambda event: None,
    num_blocks: int = 64,
    clock: Callable[[], float] = time.perf_counter,
    **settings: Any,
) -> Engine:
    """An engine without profiling. Where costs are fixed, every pass takes as long as it costs, for the ledgers."""
    config = EngineConfig(num_threads=1, kv_tokens=num_blocks * PAGE, **settings)
    cost = cost or free_rows()
    engine = build_engine(target, config, drafters=drafters, cost=cost, emit=emit, clock=clock)
    if isinstance(cost, FixedCost) and clock is time.perf_counter:
        settle = engine._drafting.settle

        def settle_as_predicted(*args: Any, base: Load, load: Load, **measured: Any) -> None:
            settle(*args, base=base, load=load, forward_s=cost.step_s(load, base), drafting=measured["drafting"])

        engine._drafting.settle = settle_as_predicted  # type: ignore[method-assign]
    return engine


@dataclass
class Answer:
    """All that one choice said."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def extend(self, output: Output) -> None:
        """Take what a step added."""
        assert self.finish_reason is None, "an output after the last one"
        assert not (self.token_ids and output.prompt_logprobs), "the prompt's come with the first word"
        self.prompt_logprobs.extend(output.prompt_logprobs)
        self.token_ids.extend(output.token_ids)
        self.text += output.text
        self.logprobs.extend(output.logprobs)
        self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error

    def begins(self, whole: Answer) -> bool:
        """Whether this could be cut out of the front of a whole answer."""
        count = len(self.token_ids)
        same_prompt = not count or self.prompt_logprobs == whole.prompt_logprobs
        return same_prompt and self.token_ids == whole.token_ids[:count] and self.logprobs == whole.logprobs[:count]


MOST_STEPS = 3000


def steps(engine: Engine) -> Iterator[list[Output]]:
    """Step until the engine is idle; one that turns in circles is a failure, not a hang."""
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            return
        yield engine.step()
    raise AssertionError("the engine does not come to an end")


def run_alone(engine: Engine, request: Request) -> list[Answer]:
    """Serve one request on an idle engine."""
    answers = [Answer() for _ in range(request.sampling.n)]
    engine.submit(request)
    for outputs in steps(engine):
        for output in outputs:
            answers[output.choice].extend(output)
    return answers
