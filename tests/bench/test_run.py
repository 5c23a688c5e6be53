from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.bench.made_up import question, unit
from tests.tiny_models import write_tiny_model
from understudy.assembly import Target, load_target, with_draft
from understudy.bench import run
from understudy.bench.arrivals import Closed, Recorded, Timed
from understudy.bench.engines import build_arms, drafters_of, encoder, room_tokens
from understudy.bench.in_step import Serving, serve_in_step
from understudy.bench.prompts import Prompt
from understudy.bench.record import MemoryBytes
from understudy.bench.workloads import Plan, Unit, choose
from understudy.config import EngineConfig
from understudy.core.request import Output, Request, Speculation, SpeculationCounts

TEXTS = (
    "the cat and the dog and the other one went there then, the cat and the dog",
    "one two three one two three one two three four",
    "and the dog and the cat and the dog and the cat went home then",
)


@dataclass
class FakeSequence:
    counts: SpeculationCounts


@dataclass
class FakeEngine:
    """Says one token of every request per step, four in all, and a step takes a second."""

    now_s: float = 0.0
    step_s: float = 1.0
    said: dict[str, int] = field(default_factory=dict)
    most_at_once: int = 0
    requests: list[Request] = field(default_factory=list)

    def submit(self, request: Request) -> list[FakeSequence]:
        self.requests.append(request)
        self.said[request.request_id] = 0
        return [FakeSequence(SpeculationCounts(cycles=4))]

    def step(self) -> list[Output]:
        self.now_s += self.step_s
        self.most_at_once = max(self.most_at_once, len(self.said))
        outputs = []
        for name in list(self.said):
            self.said[name] += 1
            ended = self.said[name] == 4
            outputs.append(Output(name, 0, (self.said[name],), "x", finish_reason="length" if ended else None))
            if ended:
                del self.said[name]
        return outputs

    def clock(self) -> float:
        return self.now_s

    def begin(self, work: Unit) -> Serving:
        requests = [run._request(work, place) for place in range(len(work.questions))]
        return Serving(self, requests, work.arrivals, now=self.clock)  # type: ignore[arg-type]

    def serve(self, work: Unit) -> list[tuple[float, float, float]]:
        """Arrival, first token and end of each answer."""
        serving = self.begin(work)
        serve_in_step([serving])
        answers = serving.answers
        assert [answer.text for answer in answers] == ["xxxx"] * len(work.questions)
        assert [answer.token_ids for answer in answers] == [(1, 2, 3, 4)] * len(work.questions)
        assert all(answer.first_s is not None for answer in answers)
        return [(answer.arrived_s, answer.first_s or 0.0, answer.ended_s) for answer in answers]


def work(count: int, arrivals: Closed | Timed) -> Unit:
    questions = tuple(question(f"code-{i}") for i in range(count))
    return unit(questions=questions, arrivals=arrivals)


def test_a_closed_loop_keeps_so_many_running() -> None:
    engine = FakeEngine(now_s=100.0)
    assert engine.serve(work(3, Closed(2))) == [(0.0, 1.0, 4.0), (0.0, 1.0, 4.0), (4.0, 5.0, 8.0)]
    assert engine.most_at_once == 2


def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    """The second is due within a step: what it waits for that step to end is its own waiting time."""
    engine = FakeEngine(now_s=100.0)
    assert engine.serve(work(3, Timed((0.0, 0.25, 9.0)))) == [(0.0, 1.0, 4.0), (0.25, 2.0, 5.0), (9.0, 10.0, 13.0)]
    assert engine.now_s == 100.0 + 9.0, "nobody slept until the last one came"
    assert engine.most_at_once == 2


def test_engines_side_by_side_have_clocks_of_their_own() -> None:
    """Both share one machine; whoever is behind goes on, so that a slow time of the machine hits both."""
    machine = FakeEngine()
    turns: list[str] = []

    class Half(FakeEngine):
        """Takes half as long for a step, on the same machine."""

        name, seconds = "half", 0.5

        def step(self) -> list[Output]:
            machine.now_s += self.seconds
            turns.append(self.name)
            return super().step()

        def clock(self) -> float:
            return machine.now_s

    class Whole(Half):
        name, seconds = "whole", 1.0

    both = [engine.begin(work(2, Closed(1))) for engine in (Whole(), Half())]
    serve_in_step(both)
    assert [serving.clock_s for serving in both] == [8.0, 4.0]
    assert [[answer.ended_s for answer in serving.answers] for serving in both] == [[4.0, 8.0], [2.0, 4.0]]
    assert turns[:7] == ["whole", "half", "half", "whole", "half", "half", "whole"]


def test_who_waits_for_an_arrival_is_not_behind_for_ever() -> None:
    engine, other = FakeEngine(), FakeEngine()
    both = [engine.begin(work(2, Timed((0.0, 50.0)))), other.begin(work(2, Closed(1)))]
    serve_in_step(both)
    assert [serving.clock_s for serving in both] == [54.0, 8.0]


# ------------------------------------------------------------------------------------------------ a real engine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_tiny_model(tmp_path_factory.mktemp("bench") / "tiny"), num_threads=1)


def plan_for(target: Target, **options: object) -> Plan:
    prompts = [Prompt("chat", text=text) for text in TEXTS]
    chosen = choose(prompts, encoder(target), max_tokens=24, seed=1)
    return Plan(questions=chosen.by_class, temperatures=(0.0,), **options)  # type: ignore[arg-type]


def test_arms_say_the_same_words_and_tell_what_they_did(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    # with passes of microseconds it is chance whether drafts pay: they are forced
    forced = Speculation(forced=True)
    monkeypatch.setattr(run, "_request", lambda *asked, ask=run._request: replace(ask(*asked), speculation=forced))
    plan = plan_for(target, concurrencies=(3,))
    plain, default = build_arms(target, ["plain", "default"], plan)
    (here,) = plan.round(0)
    for arm in (plain, default):
        arm.warm_up(here)
    served = run.in_step([plain, default], here)
    assert [a.said for a in served["plain"].answers] == [a.said for a in served["default"].answers]
    counts = {name: SpeculationCounts() for name in served}
    for name, result in served.items():
        for answer in result.answers:
            assert answer.counts is not None
            assert answer.ttft_ms is not None
            assert 0 < answer.ttft_ms <= answer.request_ms
            counts[name].add(answer.counts)
        assert result.num_tokens == sum(len(a.token_ids or ()) for a in result.answers) > 3
        assert 0 < result.steps.forward_s < result.busy_s
    assert counts["plain"].drafted == 0
    assert counts["default"].drafted > 0
    assert counts["default"].cycles < counts["plain"].cycles
    assert served["default"].steps.num_steps < served["plain"].steps.num_steps


def test_a_repetition_finds_nothing_of_the_one_before(target: Target) -> None:
    """Neither a learned answer, as every request is another tenant's, nor a cached prefix."""
    plan = plan_for(target, concurrencies=(3,))
    engine = FakeEngine()
    for number in range(2):
        (here,) = plan.round(number)
        engine.serve(here)
    assert len({request.prompt_ids for request in engine.requests}) == 3
    assert len({request.tenant for request in engine.requests}) == 18
    (arm,) = build_arms(target, ["default"], plan)
    assert not arm.engine.config.prefix_cache


def test_names_of_arms() -> None:
    assert drafters_of("plain") == drafters_of("none") == ()
    assert drafters_of("default") == EngineConfig().drafters
    assert drafters_of("suffix+ngram") == ("suffix", "ngram")


def test_memory_by_hand(target: Target) -> None:
    """A token's keys and values: two layers of two heads of 16, fp32; one layer in the draft's own cache."""
    plan = plan_for(target, concurrencies=(1, 64))
    room = room_tokens(target, plan)
    longest = max(len(q.prompt_ids) for q in plan.all_questions) + 24
    assert room % target.page_tokens == 0
    assert room >= 64 * longest
    per_layer = 2 * 4 * 2 * 16
    (plain,) = build_arms(target, ["plain"], plan)
    assert plain.facts.memory == MemoryBytes(target.num_bytes, 0, room * 2 * per_layer)
    with_layers = with_draft(target, "layers:1")
    memory = {arm.name: arm.facts.memory for arm in build_arms(with_layers, ["plain", "default", "suffix"], plan)}
    assert memory["plain"] == memory["suffix"] == plain.facts.memory
    assert memory["default"] == MemoryBytes(target.num_bytes, 0, room * 3 * per_layer)


def test_a_draft_of_its_own_has_memory_of_its_own(target: Target, tmp_path: Path) -> None:
    plan = plan_for(target, concurrencies=(1,))
    drafted = with_draft(target, write_tiny_model(tmp_path / "draft", num_hidden_layers=1))
    assert drafted.draft is not None
    (arm,) = build_arms(drafted, ["model"], plan)
    assert arm.facts.memory.draft == drafted.draft.num_bytes > 0
    assert arm.facts.drafters == ("model",)


def test_room_has_its_limits(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.bench.engines._MOST_ROOM_BYTES", 4000 * target.kv_bytes_per_token)
    plan = plan_for(target, arrival_times=Recorded([0.0] * 500))
    assert 4000 <= room_tokens(target, plan) < 4000 + 2 * target.page_tokens


def test_too_long_a_prompt_is_none(target: Target) -> None:
    assert encoder(target)(Prompt(text="cat " * 2000)) is None
    assert encoder(target)(Prompt(text="cat"))
