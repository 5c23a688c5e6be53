"""Every field of a request is honoured exactly, or refused by name, or named as having no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import TOOLS_TEMPLATE, USER, Served, serve_fake
from understudy.core.request import Grammar
from understudy.server.config import ServerConfig

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve_fake(tmp_path_factory.mktemp("model"))


BOTH: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0}),
    ({"temperature": 2}, {"temperature": 2}),
    ({}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "n": 1, "stop": (), "logprobs": None, "grammar": None}),
    ({"temperature": None, "n": None, "stop": None}, {"temperature": 1.0, "n": 1, "stop": ()}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"n": 3}, {"n": 3}),
    ({"stop": "x"}, {"stop": ("x",)}),
    ({"stop": ["x", "yz"]}, {"stop": ("x", "yz")}),
    ({"max_tokens": 5}, {"max_tokens": 5}),
    ({"presence_penalty": -1.5, "frequency_penalty": 2}, {"presence_penalty": -1.5, "frequency_penalty": 2}),
    ({"logit_bias": {"7": -100, "12": 3.5}}, {"logit_bias": {7: -100, 12: 3.5}}),
    ({"seed": 7}, {"seed": 7}),
    ({"seed": -1}, {"seed": 2**64 - 1}),
    ({"seed": -(2**63)}, {"seed": 2**63}),
    ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.2}, {"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.2}),
    ({"stop_token_ids": [5, 6], "ignore_eos": True}, {"stop_token_ids": (5, 6), "ignore_eos": True}),
    ({"min_tokens": 2, "max_tokens": 4}, {"min_tokens": 2}),
    ({"response_format": {"type": "text"}}, {"grammar": None}),
    ({"response_format": {"type": "json_object"}}, {"grammar": ANY_OBJECT}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"grammar": Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')},
    ),
    ({"response_format": {"type": "regex", "pattern": "[ab]+"}}, {"grammar": Grammar("regex", "[ab]+")}),
    ({"structured_outputs": {"regex": "[ab]+"}}, {"grammar": Grammar("regex", "[ab]+")}),
    ({"structured_outputs": {"json_object": True}}, {"grammar": ANY_OBJECT}),
    ({"structured_outputs": {"choice": ["a", 'b"']}}, {"grammar": Grammar("lark", 'start: "a" | "b\\""\n')}),
    ({"guided_json": '{"type": "array"}'}, {"grammar": Grammar("json_schema", '{"type": "array"}')}),
    ({"guided_regex": "a|b"}, {"grammar": Grammar("regex", "a|b")}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": Grammar("lark", 'start: "a"')}),
]


@pytest.mark.parametrize(("body", "expected"), BOTH, ids=str)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_sampling_is_passed_on(served: Served, endpoint: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    answer = getattr(served, endpoint)(**body)
    assert answer.status_code == 200, answer.text
    sampling = served.asked.sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"logprobs": False}, {"logprobs": None}),
        ({"max_tokens": None, "max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"max_tokens": 6, "max_completion_tokens": 6}, {"max_tokens": 6}),
    ],
    ids=str,
)
def test_chat_alone(served: Served, body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert served.chat(**body).status_code == 200
    assert {name: getattr(served.asked.sampling, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {"max_tokens": 16}),
        ({"logprobs": 3}, {"logprobs": 3, "prompt_logprobs": None}),
        ({"logprobs": 3, "echo": True}, {"logprobs": 3, "prompt_logprobs": 3}),
        ({"echo": True}, {"logprobs": None, "prompt_logprobs": None}),
        ({"max_tokens": 0, "echo": True}, {"max_tokens": 1}),
        ({"n": 2, "best_of": 2}, {"n": 2}),
        ({"suffix": ""}, {}),
    ],
    ids=str,
)
def test_completions_alone(served: Served, body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert served.complete(**body).status_code == 200
    assert {name: getattr(served.asked.sampling, name) for name in expected} == expected


def test_a_prediction_reaches_no_further_than_an_answer_can(served: Served) -> None:
    assert served.chat(prediction={"type": "content", "content": "a b " * 5000}).status_code == 200
    tokenizer, context = served.service.tokenizer, served.service.backend.info.max_context
    assert served.asked.prediction_ids == tuple(tokenizer.encode("a b " * 5000, add_special=False))[:context]
    assert len(served.asked.prediction_ids) == context


def test_rest_of_the_request(served: Served) -> None:
    wanted = {"enabled": False, "max_depth": 3, "max_rows": 5, "drafter": "ngram"}
    answer = served.chat(
        speculation=wanted,
        prediction={"type": "content", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]},
        priority=-3,
        metadata={"workload_class": "Code"},
    )
    assert answer.status_code == 200
    request, tokenizer = served.asked, served.service.tokenizer
    assert {name: getattr(request.speculation, name) for name in wanted} == wanted
    assert request.prediction_ids == tuple(tokenizer.encode("the\ncat", add_special=False))
    assert (request.priority, request.workload_class, request.tenant) == (-3, "code", "")
    assert request.request_id == answer.json()["id"]


def test_class_of_the_header_wins(served: Served) -> None:
    body = {"messages": USER, "metadata": {"workload_class": "code"}, "max_tokens": 2}
    assert served.client.post("/v1/chat/completions", json=body, headers={"x-workload-class": "rag"}).is_success
    assert served.asked.workload_class == "rag"


def test_salt_separates_tenants(served: Served) -> None:
    tenants = []
    for salt in ("one", "two", "one"):
        served.chat(cache_salt=salt)
        tenants.append(served.asked.tenant)
    assert tenants[0] == tenants[2] != tenants[1]
    assert "one" not in tenants[0]


def test_without_a_seed_one_is_drawn_and_told(served: Served) -> None:
    first, second = served.chat(), served.chat()
    assert first.json()["seed"] != second.json()["seed"]
    assert first.headers["x-seed"] == str(first.json()["seed"])
    again = served.chat(seed=first.json()["seed"])
    assert again.json()["choices"] == first.json()["choices"]


def test_default_length_is_the_rest_of_the_context(served: Served) -> None:
    answer = served.chat(max_tokens=None)
    assert answer.json()["usage"]["total_tokens"] == 512
    assert served.asked.sampling.max_tokens == 512 - len(served.asked.prompt_ids)


def test_default_length_is_clipped(served: Served) -> None:
    assert served.complete(prompt=[5] * 505).json()["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("keep", [1, 4, -1])
def test_truncated_prompt(served: Served, keep: int) -> None:
    assert served.complete(prompt=[*range(5, 105)] * 6, truncate_prompt_tokens=keep, max_tokens=8).status_code == 200
    expected = ([*range(5, 105)] * 6)[-(keep if keep > 0 else 504) :]
    assert served.asked.prompt_ids == tuple(expected)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"7": 101}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": 50}, "min_tokens"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "regex", "pattern": "a(("}}, "response_format"),
        ({"guided_regex": "a(("}, "guided_regex"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"wish": "a"}}, "structured_outputs"),
        ({"speculation": {"drafter": "nobody"}}, "speculation"),
        ({"speculation": {"max_depth": 65}}, "speculation"),
        ({"speculation": {"forced": True}}, "speculation"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"priority": 2**31}, "priority"),
    ],
    ids=str,
)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_refused_by_name(served: Served, endpoint: str, body: dict[str, Any], name: str) -> None:
    _assert_refused(getattr(served, endpoint)(**body), name)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {"x": 1}}, "web_search_options"),
        ({"chat_template": "x"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools"),
        ({"tool_choice": "required"}, "tools"),
    ],
    ids=str,
)
def test_chat_refuses_by_name(served: Served, body: dict[str, Any], name: str) -> None:
    _assert_refused(served.chat(**body), name)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [304]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
    ids=str,
)
def test_completions_refuse_by_name(served: Served, body: dict[str, Any], name: str) -> None:
    _assert_refused(served.complete(**body), name)


def _assert_refused(answer: Any, name: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"], error["code"]) == (name, "invalid_request_error", "invalid_value")
    assert error["message"]


@pytest.mark.parametrize("body", [{"max_tokens": 500}, {"messages": [{"role": "user", "content": "x1" * 600}]}])
def test_too_long_for_the_context(served: Served, body: dict[str, Any]) -> None:
    answer = served.chat(**body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_unknown_fields_are_named(served: Served) -> None:
    heard: list[tuple[str, ...]] = []
    served.service.on_ignored_fields = heard.append  # type: ignore[attr-defined]
    answer = served.chat(zebra=1, store=True, service_tier="auto", user="me", nothing=None, **{"a\r\nb: c": 1})
    assert answer.headers["x-ignored-fields"] == "a??b??c,zebra,service_tier,store"
    assert heard == [("a\r\nb: c", "zebra", "service_tier", "store")]
    many = served.chat(**{f"field_{number:03}{'x' * 200}": 1 for number in range(100)})
    assert many.headers["x-ignored-fields"].endswith(",...")
    assert len(many.headers["x-ignored-fields"]) < 1100
    assert "x-ignored-fields" not in served.chat(user="me").headers
    assert served.chat(stream_options={"x": 1}).headers["x-ignored-fields"] == "stream_options.x"


def test_strict_refuses_unknown_fields(tmp_path: Path) -> None:
    strict = serve_fake(tmp_path, config=ServerConfig(strict=True))
    _assert_refused(strict.chat(zebra=1), "zebra")
    assert strict.chat(store=False, user="x").status_code == 200


def test_template_settings(tmp_path: Path) -> None:
    served = serve_fake(tmp_path, template=TOOLS_TEMPLATE)
    tokenizer = served.service.tokenizer
    served.chat(chat_template_kwargs={"loud": True}, add_generation_prompt=False)
    assert tokenizer.decode(served.asked.prompt_ids, skip_special=False).endswith("<|im_end|>\nLOUD")
    served.chat(messages=[{"role": "developer", "content": "x"}, *USER])
    assert "<|im_start|>system\nx" in tokenizer.decode(served.asked.prompt_ids, skip_special=False)


def test_stop_string_is_kept_if_asked(served: Served) -> None:
    text = served.complete(seed=1, max_tokens=64).json()["choices"][0]["text"]
    stop = next(character for character in text[3:] if character.isascii() and character.isprintable())
    cut = served.complete(seed=1, max_tokens=64, stop=[stop]).json()["choices"][0]
    kept = served.complete(seed=1, max_tokens=64, stop=[stop], include_stop_str_in_output=True).json()["choices"][0]
    assert cut["text"] == text[: text.index(stop)]
    assert kept["text"] == cut["text"] + stop
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)


def test_no_template_no_chat(tmp_path: Path) -> None:
    _assert_refused(serve_fake(tmp_path, template=None).chat(), "messages")


def test_metrics_are_shown_if_asked(served: Served) -> None:
    assert "metrics" not in served.chat().json()
    block = served.chat(include_metrics=True).json()["metrics"]["speculative_decoding"]
    assert len(block["acceptance_histogram"]) == block["num_spec_tokens"] + 1
    assert served.chat(include_metrics=True, n=2).json()["metrics"] is None
    body = {"prompt": "a"}
    assert served.client.post("/v1/completions", json=body, headers={"x-include-metrics": "1"}).json()["metrics"]
