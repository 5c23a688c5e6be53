"""What `advise` predicts beside what is measured: the speed-up of decoding, by class, drafter and depth.

    python benchmarks/advise_accuracy.py [--classes code,rag] [--depths 2,4,8] [--drafters suffix,ngram]
        [--concurrency 1,4] [--rounds 6] [--num-prompts 4] [--max-tokens 64] [--threads N] [--json OUT]
    python benchmarks/advise_accuracy.py --draft layers:6 --drafters model

The prediction is advise's own: the target speaks once, its words are replayed with the drafter and the depth, and the
cycles are timed with the costs of this machine (advise/timing.py). The measurement is what the engine does: the same
prompts, plainly and with that drafter forced to that depth, in turn, round after round. Both are of decoding alone:
steps that compute rows of a prompt are left out on both sides. What passes cost is sampled beside every measurement, so
that prediction and measurement see the same machine; of both the median counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from understudy.advise.chains import read, score_chains
from understudy.advise.replay import Limits, score
from understudy.advise.scores import Score
from understudy.advise.study import measure_costs, profile_of
from understudy.advise.timing import Costs, expected_speedup, fit_host
from understudy.advise.transcript import Transcript
from understudy.assembly import Target, build_engine, load_target, make_drafter
from understudy.bench.engines import encoder, room_tokens
from understudy.bench.prompts import own_prompts
from understudy.bench.workloads import Plan, Question, choose
from understudy.config import EngineConfig
from understudy.core.events import Cycle
from understudy.core.request import Request, Speculation
from understudy.drafters.base import PricedDrafter
from understudy.engine.engine import Engine
from understudy.upkeep import calm_process

PLAIN = Speculation(enabled=False)


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    workload_class: str
    drafter: str
    depth: int
    concurrency: int

    @property
    def speculation(self) -> Speculation:
        """As a request carries it."""
        return Speculation(forced=True, drafter=self.drafter, max_depth=self.depth)


@dataclass(frozen=True)
class Line:
    """What was predicted and what was measured."""

    setting: Setting
    predicted: float
    measured: float
    measured_low: float
    measured_high: float
    """The middle half of the rounds."""

    @property
    def ratio(self) -> float:
        """Predicted by measured."""
        return self.predicted / self.measured


class Stage:
    """An engine that answers questions, and remembers what its steps took."""

    def __init__(
        self, target: Target, questions: Mapping[str, Sequence[Question]], drafters: Sequence[str], most: int
    ) -> None:
        self._cycles: list[Cycle] = []
        plan = Plan(questions=questions, temperatures=(0.0,), concurrencies=(most,))
        config = EngineConfig(
            drafters=tuple(drafters),
            weights=target.weights,
            prefix_cache=False,
            kv_tokens=room_tokens(target, plan),
            max_sequences=most,
        )
        self._engine: Engine = build_engine(target, config, emit=self._hear)
        self._number = 0

    def _hear(self, event: object) -> None:
        if isinstance(event, Cycle):
            self._cycles.append(event)

    def serve(
        self, questions: Sequence[Question], speculation: Speculation, concurrency: int
    ) -> tuple[list[Cycle], list[Transcript]]:
        """Answer questions, so many at once; return the steps that computed no row of a prompt, and what was said."""
        self._cycles.clear()
        self._number += 1
        waiting = [
            Request(
                request_id=f"{self._number}-{question.name}",
                prompt_ids=question.prompt_ids,
                sampling=question.sampling(0.0),
                speculation=speculation,
                tenant=f"{self._number}-{question.name}",
                workload_class=question.prompt.prompt_class,
            )
            for question in questions
        ]
        requests = {request.request_id: request for request in waiting}
        words: dict[str, list[int]] = {}
        while waiting or self._engine.has_work:
            while waiting and self._engine.num_live_requests < concurrency:
                self._engine.submit(waiting.pop(0))
            for output in self._engine.step():
                words.setdefault(output.request_id, []).extend(output.token_ids)
        said = [
            Transcript(request=request, answer_ids=tuple(words[name]), seed=request.sampling.seed or 0)
            for name, request in requests.items()
        ]
        return [cycle for cycle in self._cycles if not cycle.num_prompt_rows], said


def speed(cycles: Sequence[Cycle]) -> float:
    """Words per second of decoding."""
    return sum(cycle.num_emitted for cycle in cycles) / sum(cycle.total_s for cycle in cycles)


def main() -> None:
    """Predict, measure, print."""
    options = read_options()
    depths = [int(word) for word in options.depths.split(",")]
    drafters = options.drafters.split(",")
    concurrencies = [int(word) for word in options.concurrency.split(",")]
    target = load_target(num_threads=options.threads, draft=options.draft)
    questions = choose(
        own_prompts(),
        encoder(target),
        max_tokens=options.max_tokens,
        seed=0,
        classes=options.classes.split(","),
        per_class=options.num_prompts,
    ).by_class
    settings = [
        Setting(name, drafter, depth, concurrency)
        for name in questions
        for drafter in drafters
        for depth in depths
        for concurrency in concurrencies
    ]
    most = max(concurrencies)
    stage = Stage(target, questions, drafters, most)
    calm_process()  # as where it is served
    heard: list[Cycle] = []
    scores: dict[Setting, Score] = {}
    for name, asked in questions.items():
        cycles, transcripts = stage.serve(asked, PLAIN, 1)  # the run that advise rests on
        heard += cycles
        heard += stage.serve(asked, Speculation(forced=True, max_depth=4, drafter=drafters[0]), most)[0]
        found = {drafter: scored(target, transcripts, drafter, depths) for drafter in drafters}
        for setting in [setting for setting in settings if setting.workload_class == name]:
            scores[setting] = found[setting.drafter][setting.depth]
    of_target = profile_of(target, most_rows=most * (1 + max(depths)))
    of_draft = None if target.draft is None else profile_of(target, most_rows=128, of_draft=True)
    measured: dict[Setting, list[float]] = {setting: [] for setting in settings}
    lines: list[Line] = []
    started_s = time.monotonic()
    for number in range(options.rounds):
        for setting in settings:
            for profile in [of_target, of_draft]:
                if profile is not None:
                    profile.sample()
            asked = questions[setting.workload_class]
            arms = [PLAIN, setting.speculation][:: 1 if number % 2 else -1]
            speeds = {arm.enabled: speed(stage.serve(asked, arm, setting.concurrency)[0]) for arm in arms}
            measured[setting].append(speeds[True] / speeds[False])
        costs = Costs(
            cost=of_target.model(), draft_cost=None if of_draft is None else of_draft.model(), host=fit_host(heard)
        )
        lines = [line_of(setting, scores[setting], costs, measured[setting]) for setting in settings]
        if options.json:  # of all rounds so far: who stops it has them
            told = [asdict(line) | {"ratio": line.ratio, "rounds": number + 1} for line in lines]
            Path(options.json).write_text(json.dumps(told, indent=1))
        sys.stderr.write(f"round {number + 1} of {options.rounds}, {time.monotonic() - started_s:.0f} s\n")
    show(lines)


def scored(target: Target, transcripts: Sequence[Transcript], drafter: str, depths: Sequence[int]) -> dict[int, Score]:
    """Score a drafter at each depth on what the target said."""
    model = target.decoder.config
    limits = Limits(vocab_size=model.vocab_size, max_context=model.max_positions)
    if drafter == "model":
        cost = measure_costs(target, [], concurrencies=[1], budget_s=3.0).draft_cost
        assert cost is not None, "the drafter `model` needs --draft"
        priced = cast(PricedDrafter, make_drafter("model", target, num_blocks=256, draft_cost=cost))
        found = score_chains(read(priced, transcripts, cost=cost), name="model", depths=depths, limits=limits)
    else:
        found = score(lambda: make_drafter(drafter, target, num_blocks=1), transcripts, depths=depths, limits=limits)
    return dict(zip(depths, found, strict=True))


def line_of(setting: Setting, found: Score, costs: Costs, measured: Sequence[float]) -> Line:
    """Put a line together."""
    predicted = expected_speedup(found, costs, concurrency=setting.concurrency)
    assert predicted is not None, "every answer has a second word"
    quarters = statistics.quantiles(measured, n=4) if len(measured) > 1 else [measured[0]] * 3
    return Line(setting, predicted.value, statistics.median(measured), quarters[0], quarters[2])


def show(lines: Sequence[Line]) -> None:
    """Print the table."""
    write = sys.stdout.write
    titles = f"{'class':<14} {'drafter':<8} {'depth':>5} {'at once':>7} {'predicted':>9} {'measured':>9}"
    write(f"{titles}  middle half  ratio\n")
    for line in lines:
        setting = line.setting
        write(
            f"{setting.workload_class:<14} {setting.drafter:<8} {setting.depth:>5} {setting.concurrency:>7} "
            f"{line.predicted:>8.2f}x {line.measured:>8.2f}x  {line.measured_low:.2f}-{line.measured_high:.2f}   "
            f"{line.ratio:>6.3f}\n"
        )
    near = sum(abs(line.ratio - 1.0) <= 0.1 for line in lines)
    write(f"{near} of {len(lines)} predictions are within 10 % of what was measured\n")


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--classes", default="code,rag,summarization,chat")
    parser.add_argument("--depths", default="2,4,8")
    parser.add_argument("--drafters", default="suffix,ngram")
    parser.add_argument("--draft", help="a draft model for the drafter `model`")
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
