"""Who drafts, and with what, by the configuration alone."""

from __future__ import annotations

from typing import Any

import pytest

from understudy.config import DRAFTERS, EngineConfig, default_drafters
from understudy.errors import ConfigError


def test_the_default_takes_what_draft_there_is() -> None:
    config = EngineConfig()
    assert (config.draft, config.wanted_draft, config.draft_tree) == ("auto", "auto", 1)
    assert config.drafters_with(None) == default_drafters() == ("suffix",)
    for kind in ("model", "eagle", "block", "medusa"):
        assert config.drafters_with(kind) == default_drafters(kind) == ("suffix", kind)


def test_drafters_beside_the_default_ones() -> None:
    config = EngineConfig(drafters=("default", "ngram"))
    assert config.drafters_with("eagle") == ("suffix", "eagle", "ngram")
    assert EngineConfig(drafters=("suffix", "default")).drafters_with("block") == ("suffix", "block")
    assert EngineConfig(drafters=("ngram",)).drafters_with("eagle") == ("ngram",)


@pytest.mark.parametrize(
    ("drafters", "draft", "wanted"),
    [
        (("default",), "none", "none"),
        (("default",), "a/folder", "a/folder"),
        (("suffix",), "auto", "none"),
        (("suffix",), "a/folder", "none"),
        ((), "auto", "none"),
        (("model",), "auto", "none"),
        (("model",), "layers:2", "layers:2"),
        (("eagle",), "auto", "eagle"),
        (("default", "eagle"), "auto", "eagle"),
        (("suffix", "eagle"), "a/folder", "a/folder"),
        (("eagle",), "eagle", "eagle"),
    ],
)
def test_what_is_loaded_is_what_somebody_uses(drafters: tuple[str, ...], draft: str, wanted: str) -> None:
    assert EngineConfig(drafters=drafters, draft=draft).wanted_draft == wanted


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"drafters": ("eagle", "block")}, "eagle and block cannot draft together"),
        ({"drafters": ("model", "medusa")}, "an engine has one draft"),
        ({"drafters": ("eagle",), "draft": "block"}, "The draft is block, and the drafter eagle"),
        ({"drafters": ("oracle",)}, "There is no drafter named 'oracle'"),
        ({"drafters": ("suffix", "suffix")}, "named twice"),
        ({"draft": None}, "draft is None"),
        ({"draft_tree": 0}, "draft_tree is 0"),
        ({"draft_tree": 17}, "Give a whole number from 1 to 16"),
        ({"draft_tree": True}, "draft_tree is True"),
    ],
)
def test_what_contradicts_itself_is_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**settings)
    assert what in str(refused.value)


def test_names_are_unlike_what_stands_for_something_else() -> None:
    assert not {"default", "none", "auto", "plain"} & set(DRAFTERS)
