"""Whatever a caller sends to the Python interface: a clear error, nothing left behind, and the next request served."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.engines import tiny_target
from understudy import LLM, EngineConfig, Output, Request, SamplingParams, Speculation, UnderstudyError
from understudy.errors import CapacityError, ConfigError, InvalidRequest

MAX_CONTEXT = 200
NUM_BLOCKS = 5
"""Less than the longest context needs, so that some requests can never fit."""
GOOD = SamplingParams(temperature=1.0, max_tokens=6, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def shared() -> LLM:
    """One engine for all of the abuse in this file."""
    config = EngineConfig(num_threads=1, kv_tokens=NUM_BLOCKS * 32, max_context=MAX_CONTEXT, max_rows_per_step=64)
    return LLM(target=tiny_target("llama"), config=config)


@pytest.fixture(scope="module")
def good_answer(shared: LLM) -> list[int]:
    """What the engine says before anybody is rude to it."""
    return shared.generate("the cat", GOOD)[0].token_ids


@pytest.fixture
def llm(shared: LLM, good_answer: list[int]) -> Iterator[LLM]:
    """The engine, with proof afterwards that nothing is left behind and that it still says the same."""
    yield shared
    assert_idle(shared)
    assert shared.generate("the cat", GOOD)[0].token_ids == good_answer
    assert_idle(shared)


def assert_idle(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.has_work
    engine.check()
    assert engine.num_free_blocks == NUM_BLOCKS
    assert engine._live == {}
    assert engine._aborted == []


# Prompts.

BAD_PROMPTS: dict[str, Any] = {
    "empty text": "",
    "no tokens": [],
    "nothing": None,
    "a number": 5,
    "bytes in place of ids": [b"ab"],
    "fractional ids": [1.5, 2.5],
    "ids as text": ["5", "6"],
    "ids of None": [None],
    "negative id": [5, -1],
    "id just outside": [304],
    "id far outside": [2**70],
    "lone surrogate": "the \ud800 cat",
    "lone low surrogate": "the \udfff",
    "ten megabytes of one letter": "a" * 10_000_000,
    "ten megabytes of words": "the cat and " * 850_000,
    "as long as the context": [5] * MAX_CONTEXT,
    "far longer than the context": [5] * 100_000,
    "a hundred kilobytes of text": "the cat and the dog " * 5_000,
}


@pytest.mark.parametrize("prompt", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_bad_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate([prompt], GOOD)
    assert len(str(caught.value)) < 300, "a message, not the prompt back"


@pytest.mark.parametrize("prompt", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_one_bad_prompt_among_good_ones_leaves_nothing_behind(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(["the cat", prompt, "the dog"], GOOD)


def test_prompt_that_can_never_fit_is_refused(llm: LLM) -> None:
    with pytest.raises(CapacityError, match="do not fit"):
        llm.generate([[5] * 150], replace(GOOD, max_tokens=40))


def test_longest_prompt_that_fits_is_served(llm: LLM) -> None:
    (result,) = llm.generate([[5] * (NUM_BLOCKS * 32 - 1)], replace(GOOD, max_tokens=1))
    assert len(result.token_ids) == 1


def test_text_of_special_tokens_and_odd_characters_is_served(llm: LLM) -> None:
    results = llm.generate(["<|im_end|>", "\x00", "\uffff", "👩‍👩‍👧", "<|endoftext|>" * 10, " " * 50, "\r\n\t"], GOOD)
    assert all(len(result.token_ids) == GOOD.max_tokens for result in results)


def test_no_prompts_are_no_results(llm: LLM) -> None:
    assert llm.generate([], GOOD) == []


# Sampling settings.

NOT_NUMBERS: tuple[Any, ...] = (math.nan, math.inf, -math.inf, None, "1", True, [1], 1 + 2j)
BAD_SETTINGS: list[dict[str, Any]] = [
    *({"temperature": value} for value in (*NOT_NUMBERS, -0.1, -1, 101, 1e300)),
    *({"top_p": value} for value in (*NOT_NUMBERS, 0, 0.0, -0.5, 1.01)),
    *({"min_p": value} for value in (*NOT_NUMBERS, -0.5, 1.01)),
    *({"top_k": value} for value in (*NOT_NUMBERS, -1, 2**31, 1.5, 2.0)),
    *({"repetition_penalty": value} for value in (*NOT_NUMBERS, 0, -1, 101)),
    *({"presence_penalty": value} for value in (*NOT_NUMBERS, -101, 101)),
    *({"frequency_penalty": value} for value in (*NOT_NUMBERS, -101, 101)),
    *({"max_tokens": value} for value in (*NOT_NUMBERS, 0, -1, -(2**63), 2**31, 5.0)),
    *({"min_tokens": value} for value in (*NOT_NUMBERS, -1, 7, 1.0)),
    *({"n": value} for value in (*NOT_NUMBERS, 0, -1, 129, 2**40)),
    *({"seed": value} for value in (math.nan, "1", True, -1, 2**64, 1.0)),
    *({"logprobs": value} for value in (math.nan, "1", True, -1, 101, 1.0)),
    *({"stop": value} for value in (("",), ("a", ""), "a", ["a"], (1,), None, (b"a",))),
    *({"stop_token_ids": value} for value in ((-1,), (1.0,), (True,), ("a",), None, 5, "ab", (2**31,))),
    *(
        {"logit_bias": value}
        for value in ([1], None, "a", {"5": 1.0}, {-1: 1.0}, {True: 1.0}, {1.0: 1.0}, {2**31: 1.0})
    ),
    *({"logit_bias": {5: value}} for value in (*NOT_NUMBERS, 1e7, -1e7)),
    *({"ignore_eos": value} for value in (None, 1, "no", [])),
]


@pytest.mark.parametrize("settings", BAD_SETTINGS, ids=repr)
def test_bad_sampling_setting_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{"max_tokens": 6, **settings})
    (name,) = settings
    assert caught.value.parameter == name
    assert name in caught.value.message


def test_unknown_sampling_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("settings", [{"logit_bias": {304: 1.0}}, {"stop_token_ids": (304,)}], ids=repr)
def test_token_that_does_not_exist_is_refused(llm: LLM, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="Token 304 does not exist"):
        llm.generate("the cat", replace(GOOD, **settings))


EXTREME_SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1e-300},
    {"temperature": 1e-40},
    {"temperature": 5e-324},
    {"temperature": 100.0},
    {"top_p": 1e-300},
    {"top_p": 1 - 1e-16},
    {"top_k": 2**31 - 1},
    {"min_p": 1.0},
    {"repetition_penalty": 100.0},
    {"repetition_penalty": 0.01},
    {"presence_penalty": 100.0, "frequency_penalty": -100.0},
    {"logit_bias": dict.fromkeys(range(304), 1e6)},
    {"logit_bias": dict.fromkeys(range(303), -1e6)},
    {"seed": 2**64 - 1},
    {"n": 128, "max_tokens": 2},
    {"logprobs": 100},
    {"min_tokens": 6, "stop_token_ids": tuple(range(303))},
    {"stop": tuple(chr(letter) * 3 for letter in range(200, 1200))},
    {"stop": ("x" * 100_000, "\ud800")},
]


@pytest.mark.parametrize("settings", EXTREME_SETTINGS, ids=lambda settings: repr(settings)[:40])
def test_extreme_setting_is_served(llm: LLM, settings: dict[str, Any]) -> None:
    sampling = replace(GOOD, **settings)
    (result,) = llm.generate("the cat", sampling)
    assert len(result.completions) == sampling.n
    assert all(len(completion.token_ids) == sampling.max_tokens for completion in result.completions)


def test_when_no_token_may_be_said_the_answer_is_an_error_and_not_a_crash(llm: LLM) -> None:
    sampling = replace(GOOD, min_tokens=6, stop_token_ids=tuple(range(304)))
    bad, good = llm.run([llm.request("the cat", sampling), llm.request("the dog", GOOD)])
    assert bad.completions[0].finish_reason == "error"
    assert "not finite" in (bad.completions[0].error or "")
    assert len(good.token_ids) == GOOD.max_tokens, "the request beside it is served"


@pytest.mark.parametrize(
    "settings", [{"max_depth": -1}, {"max_depth": 65}, {"max_rows": True}, {"max_rows": 1e9}], ids=repr
)
def test_bad_speculation_setting_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Speculation(**settings)


# Settings of the engine.

BAD_CONFIGS: list[dict[str, Any]] = [
    {"max_row_per_step": 5},
    {"temperature": 1.0},
    {"": 1},
    {"drafters": ("oracle",)},
    {"drafters": "suffix"},
    {"drafters": None},
    {"drafters": ("suffix", None)},
    {"prefix_cache": "no"},
    {"prefix_cache": 1},
    {"weights": "int4"},
    {"weights": 8},
    {"device": None},
    {"device": "gpu"},
    {"weights": ["int8"]},
    *(
        {name: value}
        for name in ("max_rows_per_step", "max_sequences", "max_context", "kv_tokens", "num_threads")
        for value in (0, -1, 1.5, True, "8", math.nan)
    ),
    {"max_sequences": None},
]


@pytest.mark.parametrize("settings", BAD_CONFIGS, ids=repr)
def test_bad_config_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig.from_mapping(settings)


def test_unknown_setting_of_an_llm_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="no setting named 'speculate'"):
        LLM("/there/is/no/such/model", speculate=True)


def test_config_and_settings_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="Give one of the two"):
        LLM(target=tiny_target("llama"), config=EngineConfig(), kv_tokens=64)


# Requests beside each other.


def request(request_id: str, **settings: Any) -> Request:
    return Request(request_id=request_id, prompt_ids=(5, 6, 7), sampling=replace(GOOD, **settings))


def test_duplicate_request_id_is_refused_and_the_running_one_goes_on(llm: LLM) -> None:
    engine = llm.engine
    (running,) = engine.submit(request("twice"))
    engine.step()
    with pytest.raises(InvalidRequest, match="running already"):
        engine.submit(request("twice"))
    while engine.has_work:
        engine.step()
    assert running.finish_reason == "length"
    assert running.num_generated == GOOD.max_tokens
    engine.submit(request("twice"))  # free again
    engine.abort("twice")
    engine.step()


def test_duplicate_request_in_a_batch_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="same id"):
        llm.run([request("a"), request("b"), request("a")])


@pytest.mark.parametrize("concurrency", [0, -1])
def test_no_concurrency_is_refused(llm: LLM, concurrency: int) -> None:
    with pytest.raises(InvalidRequest, match="concurrency"):
        llm.run([request("a")], concurrency=concurrency)


def test_a_generator_of_requests_is_served(llm: LLM) -> None:
    results = llm.run(request(name) for name in ("a", "b", "c"))
    assert [result.request_id for result in results] == ["a", "b", "c"]


def test_generate_beside_an_open_stream_loses_no_word(llm: LLM) -> None:
    alone = llm.generate("the cat", GOOD)[0].token_ids
    stream = llm.stream("the cat", GOOD)
    said = list(next(stream).token_ids)
    assert llm.generate("the dog", GOOD)[0].completions[0].finish_reason == "length"
    assert said + [token for output in stream for token in output.token_ids] == alone


def test_an_unknown_drafter_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="no drafter 'nobody'"):
        llm.generate("the cat", GOOD, speculation=Speculation(drafter="nobody"))


def test_refused_request_loses_nothing_of_those_that_run(llm: LLM) -> None:
    engine = llm.engine
    alone = llm.run([request("alone")])[0].token_ids
    (running,) = engine.submit(request("good"))
    engine.step()
    for bad in (replace(request("bad"), prompt_ids=()), replace(request("bad"), prompt_ids=(999,))):
        with pytest.raises(InvalidRequest):
            engine.submit(bad)
        engine.step()
    with pytest.raises(CapacityError):
        engine.submit(replace(request("bad"), prompt_ids=(5,) * 190))
    while engine.has_work:
        engine.step()
    assert running.tokens[3:] == alone


def interrupt(after: int) -> Callable[[Output], None]:
    """A callback that gives up after some outputs."""
    seen: list[Output] = []

    def on_output(output: Output) -> None:
        seen.append(output)
        if len(seen) == after:
            raise KeyboardInterrupt

    return on_output


@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_interrupted_batch_leaves_nothing_behind(llm: LLM, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the cat", "the dog", "the rest"], GOOD, on_output=interrupt(after))


def test_closed_stream_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.stream("the cat", GOOD)
    first = next(stream)
    assert first.token_ids
    stream.close()  # type: ignore[attr-defined]


def test_abort_of_what_does_not_run_does_nothing(llm: LLM) -> None:
    llm.engine.abort("nobody")
    llm.engine.abort("")
    assert llm.engine.step() == []


def test_abort_twice_and_after_the_end(llm: LLM) -> None:
    engine = llm.engine
    engine.submit(request("r", n=3))
    engine.step()
    engine.abort("r")
    engine.abort("r")
    outputs = engine.step()
    assert [output.finish_reason for output in outputs] == ["abort"] * 3
    engine.abort("r")
    assert engine.step() == []


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        [{}],
        [{"role": "user"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": None}],
        [5],
    ],
    ids=repr,
)
def test_bad_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(UnderstudyError):
        llm.chat(messages, GOOD)


def test_two_streams_at_once_lose_no_word(llm: LLM) -> None:
    streams = [llm.stream(prompt, GOOD) for prompt in ("the cat", "the dog")]
    outputs = [[next(stream)] for stream in streams]
    for said, stream in zip(outputs, streams, strict=True):
        said.extend(stream)
    assert [sum(len(output.token_ids) for output in said) for said in outputs] == [GOOD.max_tokens] * 2


@pytest.mark.parametrize(
    "wrong",
    [{"workload_class": ["x"]}, {"prompt_ids": (5.5, 6.2)}, {"prompt_ids": [5]}, {"tenant": 1}, {"request_id": 1}],
)
def test_a_request_checks_itself(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Request(**{"request_id": "a", "prompt_ids": (5, 6), **wrong})


def test_threads_may_share_one_llm(llm: LLM) -> None:
    prompts = ["the cat", "the dog", "and the rest", "def add", "for index", "print"]
    alone = [llm.generate(prompt, GOOD)[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(30):  # a word is lost only if another thread ends the answer at the wrong moment
            assert list(pool.map(lambda prompt: llm.generate(prompt, GOOD)[0].token_ids, prompts)) == alone
