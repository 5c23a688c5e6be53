"""Log probabilities of prompts: those of the same tokens said as an answer, bit for bit, whatever the chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.drawing_device import Device, on_device
from tests.engine.engines import PAGE, Answer, new_engine, run_alone, steps
from understudy.assembly import Target, build_engine
from understudy.config import EngineConfig
from understudy.core.events import Event, Preempted
from understudy.core.request import Request, SamplingParams, TokenLogprob
from understudy.engine.engine import Engine
from understudy.kernels.host_passes import HostPasses

PROMPT = tuple((7 + 31 * i) % 290 for i in range(2 * PAGE + 9))


def request(prompt: tuple[int, ...] = PROMPT, *, name: str = "r", **sampling: Any) -> Request:
    settings = {"max_tokens": 3, "seed": 1, "ignore_eos": True, "prompt_logprobs": 3, **sampling}
    return Request(request_id=name, prompt_ids=prompt, sampling=SamplingParams(**settings))


def scores(engine: Engine, **sampling: Any) -> list[TokenLogprob]:
    return run_alone(engine, request(**sampling))[0].prompt_logprobs


@pytest.fixture(scope="module")
def taught(llama: Target) -> list[TokenLogprob]:
    """Every token of the prompt but the first said as an answer, by a bias that leaves no choice."""
    found = []
    engine = new_engine(llama, prefix_cache=False)
    for end in range(1, len(PROMPT)):
        bias = {PROMPT[end]: 1e6}
        (answer,) = run_alone(
            engine,
            request(PROMPT[:end], max_tokens=1, logprobs=3, prompt_logprobs=None, temperature=0.0, logit_bias=bias),
        )
        assert answer.token_ids == [PROMPT[end]]
        found += answer.logprobs
    return found


def test_equal_those_of_the_same_tokens_said(llama: Target, taught: list[TokenLogprob]) -> None:
    found = scores(new_engine(llama))
    assert [entry.token_id for entry in found] == list(PROMPT[1:])
    assert found == taught
    assert all(len(entry.top) == 3 and entry.logprob <= entry.top[0][1] for entry in found)


@pytest.mark.parametrize("max_rows", [1, 2, 7, 31, 256])
def test_whatever_the_chunks(llama: Target, taught: list[TokenLogprob], max_rows: int) -> None:
    assert scores(new_engine(llama, max_rows_per_step=max_rows)) == taught


@pytest.mark.parametrize("max_rows", [2, 7, 31])
def test_on_a_device_that_draws(
    llama: Target, taught: list[TokenLogprob], max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next chunk must not begin before the logits of this one were looked at."""
    target = replace(on_device(llama, monkeypatch, Device()), draft=None)
    engine = new_engine(target, max_rows_per_step=max_rows)
    assert scores(engine) == taught
    engine.submit(request(PROMPT[:9], name="beside", prompt_logprobs=None, max_tokens=60, temperature=0.0))
    engine.submit(request(temperature=0.0))
    told = [entry for outputs in steps(engine) for output in outputs for entry in output.prompt_logprobs]
    assert told == taught


def test_of_every_architecture_in_chunks(target: Target) -> None:
    assert scores(new_engine(target)) == scores(new_engine(target, max_rows_per_step=5))


def test_on_a_machine_that_fails_the_self_test(llama: Target, taught: list[TokenLogprob]) -> None:
    assert scores(new_engine(replace(llama, is_row_invariant=False))) == taught


def test_cached_prefixes_are_passed_over_and_left_for_others(llama: Target, taught: list[TokenLogprob]) -> None:
    engine = new_engine(llama)
    plain = run_alone(engine, request(prompt_logprobs=None))[0]
    for _ in range(2):
        (sequence,) = engine.submit(request())
        answer = Answer()
        for outputs in steps(engine):
            for output in outputs:
                answer.extend(output)
        assert sequence.cached_tokens == 0
        assert answer.prompt_logprobs == taught
        assert answer.token_ids == plain.token_ids
    (sequence,) = engine.submit(request(prompt_logprobs=None))
    for _ in steps(engine):
        pass
    assert sequence.cached_tokens == 2 * PAGE
    engine.check()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_neither_lost_nor_doubled_by_preemption(llama: Target, prefix_cache: bool) -> None:
    """With two rows a step the second prompt is still computed when the first answer needs its blocks."""
    events: list[Event] = []
    prompts = {"first": PROMPT, "second": PROMPT[::-1]}
    wanted = {name: run_alone(new_engine(llama), request(prompt, max_tokens=90)) for name, prompt in prompts.items()}
    for max_rows in (2, 24):  # while a prompt is computed, and while an answer is written
        engine = new_engine(
            llama, num_blocks=7, max_rows_per_step=max_rows, prefix_cache=prefix_cache, emit=events.append
        )
        answers = {name: Answer() for name in prompts}
        for name, prompt in prompts.items():
            engine.submit(request(prompt, name=name, max_tokens=90))
        for outputs in steps(engine):
            for output in outputs:
                answers[output.request_id].extend(output)
        assert [answers[name] for name in prompts] == [wanted[name][0] for name in prompts]
        assert Preempted("second", 0) in events
        events.clear()


def test_come_with_the_first_choice_alone(llama: Target, taught: list[TokenLogprob]) -> None:
    answers = run_alone(new_engine(llama), request(n=3))
    assert [answer.prompt_logprobs for answer in answers] == [taught, [], []]


def test_a_prompt_of_one_token_has_none(llama: Target) -> None:
    assert run_alone(new_engine(llama), request((5,)))[0].prompt_logprobs == []


def test_none_are_computed_unless_asked_for(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(llama)
    num_rows = []
    forward = engine._runner.decoder._logits

    def counted(hidden: Any, wanted: Any) -> Any:
        num_rows.append(len(wanted))
        return forward(hidden, wanted)

    monkeypatch.setattr(engine._runner.decoder, "_logits", counted)
    run_alone(engine, request(prompt_logprobs=None))
    assert num_rows == [1, 1, 1]
    run_alone(engine, request())
    assert num_rows[3:] == [len(PROMPT), 1, 1]


def test_a_prompt_that_gives_no_numbers_ends_with_an_error(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(llama, EngineConfig(num_threads=1, drafters=(), kv_tokens=8 * PAGE))
    passes = HostPasses(lambda rows: np.full((len(rows.logit_rows), 304), np.nan, np.float32))
    monkeypatch.setattr(engine._runner, "_passes", passes)
    (answer,) = run_alone(engine, request())
    assert answer.finish_reason == "error"
    assert "not finite" in (answer.error or "")
    assert answer.prompt_logprobs == []
    engine.check()
