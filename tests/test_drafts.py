"""The draft beside a target: chosen, refused by name, left out with an event, and given to its drafter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tiny_models import write_tiny_model
from tests.trained_drafts import NAMES, Maker, maker, shipped, truncate, write_draft
from understudy.assembly import (
    DraftModel,
    Target,
    TrainedDraft,
    build_engine,
    load_configured,
    load_target,
    make_drafter,
    shipped_kinds,
    with_draft,
    with_draft_for,
)
from understudy.config import EngineConfig
from understudy.control.cost import CostModel
from understudy.core.events import Event, Fallback, Notice
from understudy.core.request import SamplingParams
from understudy.drafters.tree import Shape
from understudy.drafts import with_default_draft
from understudy.errors import ConfigError, ModelError
from understudy.llm import LLM

__all__ = ["maker", "shipped"]  # fixtures
COST = CostModel({1: 1.0})
SAMPLING = SamplingParams(temperature=1.0, seed=3, max_tokens=24)
Load = Callable[..., tuple[Target, list[Event]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder, num_threads=1)


@pytest.fixture
def load(folder: Path) -> Load:
    """Load the target as a configuration says, and hear what is told."""

    def load(**settings: Any) -> tuple[Target, list[Event]]:
        heard: list[Event] = []
        config = EngineConfig(num_threads=1, device="cpu", **settings)
        return load_configured(folder, config, emit=heard.append), heard

    return load


def fallbacks(events: list[Event]) -> list[str]:
    return [f"{event.what}: {event.reason}" for event in events if isinstance(event, Fallback)]


def drafters_of(target: Target, heard: list[Event], **settings: Any) -> list[str]:
    """Who drafts in an engine of this configuration, besides those that every engine has."""
    config = EngineConfig(num_threads=1, kv_tokens=512, **settings)
    engine = build_engine(target, config, cost=COST, draft_cost=COST, emit=heard.append)
    return [name for name in engine.drafter_names if name not in ("forced", "prediction")]


# ------------------------------------------------------------------------------------------------ what is chosen


def test_a_package_without_drafts_goes_on_without_them(load: Load, shipped: Path) -> None:
    found, heard = load()
    assert found.draft is None
    assert (found.draft_kind, found.draft_problem, heard) == (None, "", [])
    assert drafters_of(found, heard) == ["suffix"]


def test_the_draft_for_this_very_target_is_taken(load: Load, shipped: Path, target: Target, maker: Maker) -> None:
    write_draft(shipped / NAMES["block"], "block", target, target_hash="sha256:other")
    write_draft(shipped / NAMES["eagle"], "eagle", target)
    found, heard = load()
    assert isinstance(found.draft, TrainedDraft)
    assert (found.draft.name, found.draft_kind) == (NAMES["eagle"], "eagle")
    assert drafters_of(found, heard) == ["suffix", "eagle"]
    assert fallbacks(heard) == []
    assert load(draft="none")[0].draft is None
    assert load(drafters=("suffix", "ngram"))[0].draft is None, "nobody would use it"
    assert load(drafters=())[0].draft is None


def test_a_draft_by_its_kind_by_its_name_and_by_its_folder(load: Load, shipped: Path, target: Target) -> None:
    for kind, name in NAMES.items():
        write_draft(shipped / name, kind, target)
    assert load()[0].draft_kind == "block"
    for kind, name in NAMES.items():
        assert load(draft=kind)[0].draft_kind == kind
        assert load(draft=name)[0].draft_kind == kind
        assert load(draft=str(shipped / name))[0].draft_kind == kind
        assert load(drafters=("suffix", kind))[0].draft_kind == kind
    assert load(draft="layers:2")[0].draft_kind == "model"


def test_drafters_get_the_draft_that_they_need(shipped: Path, target: Target) -> None:
    for kind in ("block", "eagle"):
        write_draft(shipped / NAMES[kind], kind, target)  # type: ignore[arg-type, index]
    own = with_draft(target, "eagle")
    assert with_draft_for(own, ("suffix", "eagle")) is own
    assert with_draft_for(own, ("suffix", "ngram")) is own
    assert with_draft_for(own, ("block",)).draft_kind == "block"


def test_a_kind_that_does_not_come_with_the_package_is_refused_at_once(
    load: Load, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.assembly.load_model", None)  # nothing is loaded
    for settings in ({"draft": "medusa"}, {"drafters": ("medusa",)}):
        with pytest.raises(ConfigError, match="No draft 'medusa' comes with this package"):
            load(**settings)


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_named_draft_that_is_damaged_is_refused_by_name(load: Load, target: Target, tmp_path: Path) -> None:
    place = truncate(write_draft(tmp_path / "cut", "medusa", target))
    with pytest.raises(ModelError, match=r"cut/weights\.safetensors has .* bytes, and draft\.json tells"):
        load(draft=str(place))


@pytest.mark.parametrize("other", [{"target_hash": "sha256:other"}, {"shape": True}])
def test_a_named_draft_of_another_target_is_refused_by_name(
    load: Load, target: Target, tmp_path: Path, other: dict[str, Any]
) -> None:
    if "shape" in other:
        other = {"config": replace(target.decoder.config, rope_theta=5.0)}
    place = write_draft(tmp_path / "foreign", "eagle", target, target_name="somebody", **other)
    with pytest.raises(ModelError, match=r"foreign/draft\.json: The draft was trained for somebody"):
        load(draft=str(place))


@pytest.mark.parametrize("fault", ["weights", "declaration", "shape"])
def test_a_shipped_draft_that_fails_is_left_out_with_an_event(
    load: Load, shipped: Path, target: Target, fault: str
) -> None:
    other = {"config": replace(target.decoder.config, rope_theta=5.0)} if fault == "shape" else {}
    place = write_draft(shipped / NAMES["block"], "block", target, **other)
    if fault == "weights":
        truncate(place)
    elif fault == "declaration":
        (place / "draft.json").write_text("{")
    found, heard = load()
    assert found.draft is None
    (told,) = fallbacks(heard)
    assert told.startswith("the trained draft: going on without it: ")
    assert NAMES["block"] in told
    assert NAMES["block"] in found.draft_problem
    assert drafters_of(found, heard) == ["suffix"]
    with pytest.raises(ModelError):
        load(draft="block")


def test_of_several_shipped_drafts_the_sound_ones_are_known(shipped: Path, target: Target) -> None:
    for kind, name in NAMES.items():
        write_draft(shipped / name, kind, target)
    truncate(shipped / NAMES["block"])
    heard: list[Event] = []
    assert shipped_kinds(target, emit=heard.append) == ["eagle", "medusa"]
    (told,) = fallbacks(heard)
    assert NAMES["block"] in told
    (shipped / NAMES["block"] / "draft.json").write_text("[]")
    assert shipped_kinds(target, emit=heard.append) == []
    assert len(fallbacks(heard)) == 2


def test_a_shipped_drafter_that_cannot_be_made_is_left_out_with_an_event(
    load: Load, shipped: Path, target: Target, maker: Maker
) -> None:
    write_draft(shipped / NAMES["block"], "block", target)
    maker.error = RuntimeError("no such instruction")
    found, heard = load()
    assert drafters_of(found, heard) == ["suffix"]
    assert fallbacks(heard) == ["the trained draft: going on without it: no such instruction"]
    for named in ({"draft": "block"}, {"drafters": ("block",)}):
        with pytest.raises(RuntimeError, match="no such instruction"):
            drafters_of(found, heard, **named)


def test_a_drafter_without_its_draft_is_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="The drafter 'eagle' has no draft: there is none"):
        make_drafter("eagle", target, num_blocks=1)
    drafted = with_draft(target, write_draft(tmp_path / "mine", "block", target))
    with pytest.raises(ConfigError, match="the draft mine is of the kind block"):
        make_drafter("eagle", drafted, num_blocks=1)
    with pytest.raises(ConfigError, match="The drafter 'model' has no model"):
        make_drafter("model", drafted, num_blocks=1)


# ------------------------------------------------------------------------------------------------ what is made of it


def test_the_shape_and_the_threads_reach_the_drafter(target: Target, tmp_path: Path, maker: Maker) -> None:
    drafted = with_draft(target, write_draft(tmp_path / "mine", "block", target))
    for num_children in (1, 3):
        drafters_of(drafted, [], draft_tree=num_children)
    assert [made.shape for made in maker.made] == [Shape(num_children=1), Shape(num_children=3)]
    assert maker.options[0] == {"place": (target.decoder,), "num_threads": 1}


def test_the_words_are_the_same(folder: Path, target: Target, tmp_path: Path, maker: Maker) -> None:
    """Through the whole of an engine, and the Python interface."""
    place = write_draft(tmp_path / "mine", "eagle", target)
    same = {"num_threads": 1, "kv_tokens": 1024, "device": "cpu"}
    answers = []
    for settings in ({"draft": "none"}, {"draft": str(place)}, {"draft": str(place), "draft_tree": 3}):
        (result,) = LLM(folder, **same, **settings).generate("the cat and the dog and the cat and the", SAMPLING)
        answers.append(result.completions[0].token_ids)
    assert answers[0] == answers[1] == answers[2]
    assert [made.shape.num_children for made in maker.made] == [1, 3]


@pytest.mark.parametrize(("kind", "num_layers"), [("medusa", 0), ("eagle", 1), ("block", 2)])
def test_its_memory_is_counted(target: Target, tmp_path: Path, kind: Any, num_layers: int) -> None:
    heard: list[Event] = []
    draft = with_draft(target, write_draft(tmp_path / "mine", kind, target), emit=heard.append).draft
    assert isinstance(draft, TrainedDraft)
    assert draft.num_bytes == 4 * sum(p.numel() for p in draft.trained.head.state_dict().values())
    assert draft.kv_bytes_per_token == num_layers * 2 * 4 * 2 * 16  # two heads of 16, fp32
    longest = target.kv_bytes_per_token * target.decoder.config.max_positions
    assert bool([event for event in heard if isinstance(event, Notice)]) == (draft.num_bytes >= longest)


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.fixture
def on_a_gpu(target: Target) -> Target:
    return replace(target, device="cuda")


def test_on_a_gpu_a_trained_draft_has_to_be_named(on_a_gpu: Target, target: Target, shipped: Path) -> None:
    write_draft(shipped / NAMES["block"], "block", target)
    heard: list[Event] = []
    assert with_default_draft(on_a_gpu, heard.append).draft is None
    (notice,) = heard
    assert isinstance(notice, Notice)
    assert "`--draft block`" in notice.text
    assert with_default_draft(on_a_gpu, heard.append, kind="block").draft is None
    assert len(heard) == 1
    assert with_draft(on_a_gpu, "block").draft_kind == "block"


def test_a_gpu_has_drafters_of_its_own(
    on_a_gpu: Target, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Maker()
    module = ModuleType("understudy.drafters.trained_cuda")
    module.make_trained_drafter_on_device = made.make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    drafted = with_draft(on_a_gpu, write_draft(tmp_path / "mine", "eagle", target))
    heard: list[Event] = []
    assert drafters_of(drafted, heard, draft_tree=2) == ["suffix", "eagle"]
    (options,) = made.options
    runner, decoder = options["place"]
    assert (runner.decoder, decoder) == (target.decoder, target.decoder)
    assert made.made[0].shape == Shape(num_children=2)
    (memory,) = [event.text for event in heard if isinstance(event, Notice) and event.what == "the GPU's memory"]
    assert "; of the draft, " in memory


def test_models_are_drafts_as_before(target: Target) -> None:
    draft = with_draft(target, "layers:1").draft
    assert isinstance(draft, DraftModel)
    assert (draft.kind, draft.num_bytes) == ("model", 0)
