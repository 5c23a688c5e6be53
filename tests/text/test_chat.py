"""Templates render as Hugging Face renders them, and can neither reach out nor run away."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.tiny_models import CHAT_TEMPLATE
from understudy.errors import InvalidRequest
from understudy.text import chat
from understudy.text.chat import check_messages, render, uses_tools

USER = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <b>2 & 2</b>?"},
    {"role": "assistant", "content": "4", "tool_calls": [{"name": "add", "arguments": {"a": 2, "é": "ü"}}]},
    {"role": "user", "content": "Thanks\n"},
]

LIKE_MANY = """\
{%- if tools %}
    {{- '<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(count=0, last='') %}
{% for message in messages %}
    {% if loop.first and message.role == 'system' %}
{{ bos_token }}[SYS] {{ message.content | trim }}
    {% elif message['role'] == 'assistant' %}
        {% generation %}
{{ message.content + eos_token }}
        {% endgeneration %}
        {% for call in message.tool_calls or [] %}
{{ call | tojson }}{{ ', ' if not loop.last }}
        {% endfor %}
    {% else %}
        {% set ns.count = ns.count + 1 %}
[{{ loop.index }}/{{ loop.length }}] {{ message.content.strip().replace('&', 'and') ~ ' ' * 3 }}
    {% endif %}
    {% if ns.count > 5 %}{% break %}{% endif %}
{% endfor %}
{% macro ask(who, mark='>') %}{{ mark }}{{ who | upper }}{% endmacro %}
{% if add_generation_prompt %}{{ ask('assistant') }}{{ ask('x', mark='%02d' % 7) }}{% endif %}
"""


def their_rendering(template: str, messages: list[dict[str, Any]], **settings: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=template, **settings)
    return rendered[0]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LIKE_MANY])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [{"name": "add", "about": "<sums> 'em & ünïcode"}]])
def test_renders_as_hugging_face_does(template: str, prompt: bool, tools: Any) -> None:
    ours = render(template, TALK, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>", tools=tools)
    theirs = their_rendering(
        template, TALK, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>", tools=tools
    )
    assert ours == theirs


@pytest.mark.embedded
def test_embedded_template() -> None:
    from understudy.models.embedded import load_embedded

    tokenizer = load_embedded().tokenizer
    assert tokenizer.chat_template is not None
    prompt = render(tokenizer.chat_template, USER, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt, add_special=False)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert check_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "one\ntwo"}]
    silent = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}
    assert check_messages([silent])[0]["content"] == ""


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hello",
        {"role": "user", "content": "x"},
        ["hello"],
        [{"content": "x"}],
        [{"role": "", "content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "x", "extra": object()}],
    ],
)
def test_what_is_not_a_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(CHAT_TEMPLATE, messages)
    assert caught.value.parameter == "messages"


def test_the_template_may_refuse() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", USER)


def test_the_time_can_be_asked_for() -> None:
    assert render("{{ strftime_now('%Y') }}", USER) == time.strftime("%Y")


def test_messages_are_not_changed() -> None:
    with pytest.raises(InvalidRequest):
        render("{% set _ = messages.append(1) %}", USER)
    with pytest.raises(InvalidRequest):
        render("{% set _ = messages[0].update({'role': 'x'}) %}", USER)
    assert USER == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages + 3 }}",
        "{{ nothing() }}",
        "{% include 'other' %}",
        "{{ 'x' | unknown_filter }}",
    ],
)
def test_broken_templates(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render(template, USER)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages['__class__'].__name__ }}",
        "{{ render.__globals__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ strftime_now.__globals__.time }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ '{x.__class__.__mro__}' .format_map({'x': messages}) }}",
        "{{ messages | attr('__class__') }}{{ (messages | attr('__class__')).__mro__ }}",
        "{{ ([messages] | map(attribute='__class__') | first).__mro__ }}",
        "{{ namespace(__call__=raise_exception)() }}",
        "{% set ns = namespace() %}{% set ns.__call__ = raise_exception %}{{ ns() }}",
        "{{ namespace({'_x': 1}) }}",
    ],
)
def test_attributes_are_out_of_reach(template: str) -> None:
    with pytest.raises(InvalidRequest):
        render(template, USER)


NESTED = "{% for a in range(90000) %}" * 4 + "{% endfor %}" * 4
DOUBLING = (
    "{% set ns = namespace(x='xx') %}{% for a in range(60) %}{% set ns.x = BODY %}{% endfor %}{{ ns.x | length }}"
)
CALLS = (
    "{% macro m0() %}{% endmacro %}"
    + "".join(f"{{% macro m{n + 1}() %}}{{{{ m{n}() }}}}{{{{ m{n}() }}}}{{% endmacro %}}" for n in range(60))
    + "{{ m60() }}"
)


@pytest.mark.parametrize(
    "template",
    [
        NESTED,
        "{% for a in range(10000000000) %}{% endfor %}",
        CALLS,
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        DOUBLING.replace("BODY", "ns.x ~ ns.x"),
        DOUBLING.replace("BODY", "ns.x + ns.x"),
        DOUBLING.replace("BODY", "ns.x * 2"),
        DOUBLING.replace("BODY", "[ns.x, ns.x] | join"),
        DOUBLING.replace("BODY", "ns.x.replace('x', 'xx')"),
        "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ 'x\nx' | indent(width=10000000000) }}",
        "{% for a in range(90000) %}{{ 'x' * 10000 }}{% endfor %}",
        "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    ],
)
def test_no_template_runs_away(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_CHARACTERS", 2**20)
    monkeypatch.setattr(chat, "MAX_STEPS", 100_000)
    start_s = time.perf_counter()
    with pytest.raises(InvalidRequest):
        render(template, USER)
    assert time.perf_counter() - start_s < 5.0


def test_time_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.05)
    with pytest.raises(InvalidRequest, match="runs too long"):
        render(NESTED, USER)


def test_large_numbers_are_only_numbers() -> None:
    template = "{% macro show(x) %}{{ x | default(9007199254740991) }}{% endmacro %}{{ show(tools[0].maximum) + '!' }}"
    assert render(template, USER, tools=[{"maximum": 10**15}]) == "1000000000000000!"


def test_a_long_conversation_is_not_a_runaway() -> None:
    messages = [{"role": "user", "content": "word " * 2000}, {"role": "assistant", "content": "word " * 2000}] * 50
    assert render(LIKE_MANY.replace("> 5", "> 500"), messages).count("word") == 200_000


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LIKE_MANY, True),
        (CHAT_TEMPLATE, False),
        ("{% if tools is defined and tools %}x{% endif %}", True),
        ("{% set tools = [] %}{{ tools }}{{ 'tools' }}", False),
        ("{% for tools", False),
    ],
)
def test_use_of_tools_is_seen(template: str, expected: bool) -> None:
    assert uses_tools(template) is expected


def test_settings_reach_the_template() -> None:
    assert render("{{ depth }} {{ deep.er }}", USER, settings={"depth": 3, "deep": {"er": "x"}}) == "3 x"


@pytest.mark.parametrize("settings", [{"messages": []}, {"bos_token": "x"}, {"x": "y" * 20_000}, {"x": object()}])
def test_settings_are_bounded(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ x }}", USER, settings=settings)
    assert caught.value.parameter == "chat_template_kwargs"
