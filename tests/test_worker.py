"""How the process that computes starts: with its draft, or without it and with the reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_models import write_tiny_model
from tests.trained_drafts import NAMES, Maker, maker, shipped, truncate, write_draft
from understudy.assembly import Target, load_target
from understudy.config import EngineConfig
from understudy.control.cost import Load
from understudy.core.backend import ModelInfo
from understudy.core.control import PassCosts
from understudy.core.switches import Switches
from understudy.engine.engine import Engine
from understudy.errors import ConfigError
from understudy.wire.messages import Abort, Ready, Start, Told
from understudy.worker import _QUIET_S, Worker, without_draft

__all__ = ["maker", "shipped"]  # fixtures


class Wire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


@pytest.fixture(autouse=True)
def collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave that of the process which runs the tests as it is."""
    monkeypatch.setattr("understudy.worker.calm_process", lambda: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder, num_threads=1)


def built(wire: Wire, start: Start, *, is_shared: bool = False) -> Engine:
    """An engine as a worker builds it, of what it loads itself or of what was loaded before it was forked."""
    worker = Worker(wire)  # type: ignore[arg-type]
    shared = worker.load_to_share(start) if is_shared else None
    assert (shared is not None) is is_shared
    engine = worker._start(start, shared)
    assert engine is not None
    return engine


def started(folder: Path, tokenizer: Path, **settings: Any) -> tuple[ModelInfo, list[str]]:
    """Start an engine both ways, and return what it tells of itself and what did not go the first way."""
    config = EngineConfig(num_threads=1, kv_tokens=512, device="cpu", **settings)
    tokenizer.mkdir(exist_ok=True)
    found = []
    for is_shared in (False, True):
        wire = Wire()
        built(wire, Start(str(folder), config, str(tokenizer), Switches()), is_shared=is_shared)
        (ready,) = [message for message in wire.sent if isinstance(message, Ready)]
        told = [event for message in wire.sent if isinstance(message, Told) for event in message.fallbacks]
        found.append((ready.info, [f"{event.what}: {event.reason}" for event in told]))
    assert found[0] == found[1]
    return found[0]


def test_the_draft_that_comes_with_the_package_is_told_of(
    folder: Path, target: Target, shipped: Path, tmp_path: Path, maker: Maker
) -> None:
    write_draft(shipped / NAMES["block"], "block", target)
    info, told = started(folder, tmp_path / "tokenizer")
    assert (info.draft, info.draft_problem, told) == (NAMES["block"], "", [])
    assert {"suffix", "block"} <= set(info.drafters)
    assert info.draft_bytes > 0


def test_a_shipped_draft_that_fails_leaves_a_reason(
    folder: Path, target: Target, shipped: Path, tmp_path: Path
) -> None:
    truncate(write_draft(shipped / NAMES["block"], "block", target))
    info, (told,) = started(folder, tmp_path / "tokenizer")
    assert (info.draft, info.draft_bytes) == ("", 0)
    assert NAMES["block"] in info.draft_problem
    assert NAMES["block"] in told
    assert "block" not in info.drafters


@pytest.mark.parametrize("settings", [{"draft": "block"}, {"drafters": ("block",)}, {"drafters": ("ngram", "block")}])
def test_a_named_drafter_that_cannot_be_made_leaves_a_reason(
    folder: Path, target: Target, shipped: Path, tmp_path: Path, maker: Maker, settings: dict[str, Any]
) -> None:
    write_draft(shipped / NAMES["block"], "block", target)
    maker.error = RuntimeError("It cannot be made.") if "draft" in settings else ConfigError("It cannot be made.", "")
    info, told = started(folder, tmp_path / "tokenizer", **settings)
    assert "It cannot be made." in info.draft_problem
    assert told == [f"the draft: serving without it: {info.draft_problem}"]
    expected = "ngram" if "ngram" in settings.get("drafters", ()) else "suffix"
    assert expected in info.drafters
    assert "block" not in info.drafters


def test_a_kind_that_is_not_there_leaves_a_reason(folder: Path, shipped: Path, tmp_path: Path) -> None:
    info, _ = started(folder, tmp_path / "tokenizer", drafters=("eagle",))
    assert "No draft 'eagle' comes with this package" in info.draft_problem


@pytest.mark.parametrize("is_known", [False, True])
def test_costs_are_measured_unless_an_earlier_life_did(folder: Path, tmp_path: Path, is_known: bool) -> None:
    known = PassCosts(rows_s={1: 0.5, 4: 0.75}, per_key_s=1e-5, per_read_s=0.0)
    wire = Wire()
    config = EngineConfig(num_threads=1, kv_tokens=512, device="cpu")
    start = Start(str(folder), config, str(tmp_path), Switches(), cost=known if is_known else None)
    engine = built(wire, start)
    (ready,) = [message for message in wire.sent if isinstance(message, Ready)]
    assert (ready.cost == known) is is_known
    assert engine.cost.measured == ready.cost
    engine.cost.observe(Load(1, 0, 0), 10.0)
    assert engine.cost.measured == ready.cost, "as it was measured, whatever was learned since"


def test_without_a_draft_the_others_stay() -> None:
    assert without_draft(EngineConfig(draft="x")) == EngineConfig(draft="none")
    named = EngineConfig(draft="x", drafters=("suffix", "model", "ngram"))
    assert without_draft(named).drafters == ("suffix", "ngram")
    assert without_draft(EngineConfig(drafters=("eagle",))).drafters == ("default",)


def test_who_has_nothing_to_do_makes_ready_what_is_left_and_then_waits() -> None:
    """Whoever asks again at once finds nobody making anything ready."""
    waits: list[float | None] = []
    left, coming = [True] * 4, [[], [], [Abort("nobody")], [], [], [], []]
    wire = Wire()

    def receive(*, wait_s: float | None) -> list[Any]:
        waits.append(wait_s)
        return coming.pop(0)

    wire.receive = receive  # type: ignore[attr-defined]
    worker = Worker(wire)  # type: ignore[arg-type]
    engine: Any = SimpleNamespace(has_work=False, prepare=lambda: bool(left and left.pop()), abort=lambda _: None)
    engine.num_sequences, engine.num_free_blocks, engine.num_blocks, engine.step = (1, 0), 3, 4, list
    for is_busy in (False, False, False, True, False, False, False):
        engine.has_work = is_busy
        worker._turn(engine)
    assert waits == [0.0, 0.0, 0.0, 0.0, _QUIET_S, 0.0, 0.0]
    assert not left
    coming.append([])
    worker._turn(engine)
    assert waits[-1] is None, "there is nothing left: it waits for as long as it takes"
