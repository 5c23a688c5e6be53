"""Replay against the engine: for every drafter that can be replayed, the counts must be the same, all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.engines import FixedCost, free_rows, new_engine, steps, tiny_target
from understudy.advise.replay import Limits, refusal, replayable, score, score_policy
from understudy.advise.scores import ScoredCycle
from understudy.advise.transcript import Transcript
from understudy.assembly import Target, built_in_drafters, make_drafter, with_draft
from understudy.core.request import Grammar, Request, SamplingParams, Speculation, SpeculationCounts
from understudy.drafters.base import Drafter
from understudy.drafters.lookahead import LookaheadDrafter
from understudy.drafters.model import ModelDrafter
from understudy.drafters.ngram import NgramDrafter
from understudy.drafters.prediction import PredictionDrafter
from understudy.drafters.suffix import SuffixDrafter
from understudy.engine.engine import Engine
from understudy.runtime.inputs import Work

DEPTHS = (1, 3, 8)
LIMITS = Limits(max_context=512)


@pytest.fixture(scope="module")
def target() -> Target:
    return with_draft(tiny_target("llama"), "layers:1")


def model_drafter(target: Target) -> Drafter:
    return make_drafter("model", target, num_blocks=64, draft_cost=FixedCost({1: 0.1}))


def makers(target: Target) -> dict[str, Callable[[], Drafter]]:
    return {
        "suffix": SuffixDrafter,
        "ngram": NgramDrafter,
        "model": lambda: model_drafter(target),
        "prediction": PredictionDrafter,
    }


def questions(temperature: float) -> list[Request]:
    """Prompts that repeat themselves and each other, one longer than a draft model reads at once, and every end."""
    base = tuple(range(5, 25)) * 2
    shared = SamplingParams(temperature=temperature, max_tokens=40, seed=11, ignore_eos=True)
    return [
        Request(request_id="a", prompt_ids=base, sampling=shared, workload_class="code"),
        Request(request_id="b", prompt_ids=base, sampling=shared, workload_class="code"),
        Request(request_id="c", prompt_ids=base[:7], sampling=replace(shared, ignore_eos=False), tenant="ann"),
        Request(request_id="d", prompt_ids=base * 7 + (9,), sampling=replace(shared, logit_bias={7: 4.0}, top_p=0.9)),
        Request(request_id="e", prompt_ids=base[3:], sampling=replace(shared, max_tokens=1)),
        Request(request_id="f", prompt_ids=base, sampling=replace(shared, stop_token_ids=tuple(range(100, 140)))),
        Request(request_id="g", prompt_ids=(3,) * 480, sampling=shared),  # the context ends before max_tokens do
        Request(request_id="h", prompt_ids=base, sampling=replace(shared, logit_bias=dict.fromkeys((7, 8), 12.0))),
    ]


def with_prediction(transcript: Transcript) -> Request:
    """The same question with its answer foreseen, but for a few words."""
    answer = transcript.answer_ids
    prediction_ids = (*answer[:9], 3, *answer[9:20], *answer[24:])
    return replace(transcript.request, prediction_ids=prediction_ids)


def served(engine: Engine, requests: Sequence[Request]) -> list[Transcript]:
    """Ask one after the other."""
    found = []
    for request in requests:
        (sequence,) = engine.submit(request)
        for _ in steps(engine):
            pass
        answer = tuple(sequence.tokens[len(request.prompt_ids) :])
        found.append(Transcript(request=request, answer_ids=answer, seed=request.sampling.seed or 0))
    return found


def counted(engine: Engine, requests: Sequence[Request], speculation: Speculation) -> list[SpeculationCounts]:
    found = []
    for request in requests:
        (sequence,) = engine.submit(replace(request, speculation=speculation))
        for _ in steps(engine):
            pass
        found.append(sequence.counts)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["suffix", "ngram", "model", "prediction"])
def test_replay_counts_what_the_engine_counts(target: Target, name: str, temperature: float) -> None:
    requests = questions(temperature)
    transcripts = served(new_engine(target), requests)
    requests.append(with_prediction(transcripts[0]))
    transcripts.append(replace(transcripts[0], request=requests[-1]))
    make = makers(target)[name]
    scores = score(make, transcripts, depths=DEPTHS, max_rows=12, limits=LIMITS)
    for depth, found in zip(DEPTHS, scores, strict=True):
        speculation = Speculation(forced=True, max_depth=depth, max_rows=12, drafter=name)
        expected = counted(new_engine(target, drafters=[make()]), requests, speculation)
        assert [one.counts for one in found.scores] == expected
        assert found.counts.accepted > 0
        assert found.counts.cycles < found.num_tokens


def test_depths_that_share_a_model_find_what_each_finds_alone(target: Target) -> None:
    """Also of what the model computes: its passes, and what it reads."""
    transcripts = served(new_engine(target), questions(0.0))
    together = score(lambda: model_drafter(target), transcripts, depths=DEPTHS, limits=LIMITS)
    for depth, found in zip(DEPTHS, together, strict=True):
        (alone,) = score(lambda: model_drafter(target), transcripts, depths=[depth], limits=LIMITS)
        assert [(one.counts, _untimed(one.cycles)) for one in found.scores] == [
            (one.counts, _untimed(one.cycles)) for one in alone.scores
        ]


def _untimed(cycles: Sequence[ScoredCycle]) -> list[ScoredCycle]:
    return [replace(cycle, asking_s=0.0) for cycle in cycles]


def test_rows_that_a_model_reads_are_those_of_the_engine(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    forward = ModelDrafter._forward

    def counting(self: ModelDrafter, works: list[Work]) -> list[Any]:
        computed.append(sum(len(work.known) for work in works))
        return forward(self, works)

    requests = questions(0.0)[3:4]  # a prompt of 281 tokens: it is read in two pieces
    transcripts = served(new_engine(target), requests)
    found = score(lambda: model_drafter(target), transcripts, depths=DEPTHS, limits=LIMITS)
    monkeypatch.setattr(ModelDrafter, "_forward", counting)
    for depth, one in zip(DEPTHS, found, strict=True):
        computed.clear()
        speculation = Speculation(forced=True, max_depth=depth, drafter="model")
        counted(new_engine(target, drafters=[model_drafter(target)]), requests, speculation)
        cycles = one.scores[0].cycles
        assert sum(cycle.draft_passes for cycle in cycles) == len(computed)
        assert sum(cycle.read_rows + max(0, cycle.draft_passes - 1) for cycle in cycles) == sum(computed)


def test_depth_0_is_plain(target: Target) -> None:
    transcripts = served(new_engine(target), questions(0.0))
    (plain,) = score(SuffixDrafter, transcripts, depths=[0])
    assert plain.tokens_per_cycle == 1.0
    assert plain.acceptance is None


def test_history_is_what_had_ended_by_then(target: Target) -> None:
    """The same question twice: the second is foreseen from the first one's answer only if that had ended."""
    request = Request(
        request_id="a", prompt_ids=(5, 6, 7), sampling=SamplingParams(temperature=1.0, max_tokens=40, seed=11)
    )
    (said,) = served(new_engine(target), [request])
    after = [replace(said, ended_s=5.0), replace(said, arrived_s=5.0, ended_s=9.0)]
    beside = [replace(said, ended_s=5.0), replace(said, arrived_s=4.9, ended_s=9.0)]
    aborted = [replace(said, ended_s=5.0, finished=False), after[1]]
    others = [replace(said, ended_s=5.0, request=replace(request, tenant="ann")), after[1]]
    restarted = [after[0], replace(after[1], run="next")]
    accepted = {
        name: score(SuffixDrafter, texts, depths=[8])[0].scores[1].counts.accepted
        for name, texts in (("after", after), ("beside", beside), ("aborted", aborted), ("other", others),
                            ("restarted", restarted))
    }  # fmt: skip
    alone = score(SuffixDrafter, [said], depths=[8])[0].counts.accepted
    assert accepted["after"] > alone
    assert {accepted[name] for name in ("beside", "aborted", "other", "restarted")} == {alone}


def test_policy_buys_what_the_engine_buys(target: Target) -> None:
    """Where rows are next to free and passes take what they cost, the engine's own counts are met exactly."""
    requests = questions(0.0)
    requests.append(with_prediction(*served(new_engine(target), requests[:1])))
    transcripts = served(new_engine(target), requests)

    def make() -> list[Drafter]:
        return [*built_in_drafters(), SuffixDrafter(), NgramDrafter()]

    found = score_policy(make, transcripts, cost=free_rows(), limits=LIMITS)
    expected = counted(new_engine(target, drafters=make()), requests, Speculation())
    assert [one.counts for one in found.scores] == expected
    assert found.counts.accepted > 0
    assert (found.drafter, found.depth) == ("forced+prediction+suffix+ngram", None)


def test_policy_buys_nothing_where_rows_are_dear(target: Target) -> None:
    transcripts = served(new_engine(target), questions(1.0))
    found = score_policy(lambda: [SuffixDrafter()], transcripts, cost=FixedCost({1: 1.0, 8: 40.0}))
    assert found.counts.rows < 0.05 * found.num_tokens


def test_what_cannot_be_replayed_is_named(target: Target) -> None:
    request = questions(0.0)[0]
    bound = replace(request, sampling=replace(request.sampling, grammar=Grammar("regex", "a+")))
    plain = Transcript(request=request, answer_ids=(1, 2), seed=0)
    kept, (left_out,) = replayable([plain, replace(plain, request=bound)])
    assert kept == [plain]
    assert "grammar" in left_out.reason
    assert "rows" in refusal("lookahead")
    with pytest.raises(AssertionError, match="lookahead cannot be replayed"):
        score(LookaheadDrafter, [plain], depths=[2])


def test_drafter_that_fails_is_no_empty_draft(target: Target) -> None:
    class Broken(NgramDrafter):
        def start(self, context: object) -> None:
            raise ValueError("torn")

    transcripts = served(new_engine(target), questions(0.0)[:1])
    with pytest.raises(RuntimeError, match="torn"):
        score(Broken, transcripts, depths=[2])
