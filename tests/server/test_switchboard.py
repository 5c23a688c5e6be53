"""The kill switch: the strictest source wins, what cannot be read means off, and every flip is written down."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.fake_backend import FakeBackend
from tests.server.served import fake_service
from understudy.core.events import Fallback
from understudy.core.request import Speculation
from understudy.core.switches import ALL_ON, OFF, Switches
from understudy.errors import ConfigError
from understudy.server import switchboard as switchboard_module
from understudy.server.app import make_app
from understudy.server.audit import NUM_KEPT, AuditLog
from understudy.server.config import ServerConfig
from understudy.server.service import Service
from understudy.server.switchboard import Switchboard, read_file, strictest

ADMIN = {"authorization": "Bearer admin-key"}
SWITCHES = st.builds(
    Switches,
    enabled=st.booleans(),
    classes_off=st.frozensets(st.sampled_from(["chat", "code"])),
    drafters_off=st.frozensets(st.sampled_from(["suffix", "model"])),
    max_depth=st.one_of(st.none(), st.integers(0, 8)),
)


@given(st.lists(SWITCHES, max_size=4), st.sampled_from(["chat", "math"]), st.sampled_from(["suffix", "ngram"]))
def test_strictest_allows_only_what_all_allow(all_switches: list[Switches], workload: str, drafter: str) -> None:
    together = strictest(all_switches)
    wanted = Speculation(max_depth=6)
    assert together.depth_of(wanted, workload) == min(
        [switches.depth_of(wanted, workload) for switches in all_switches], default=6
    )
    assert together.allows(drafter) == all(switches.allows(drafter) for switches in all_switches)


def test_more_names_than_can_be_told_mean_off() -> None:
    many = [Switches(classes_off=frozenset(f"{letter}{n}" for n in range(200))) for letter in "ab"]
    assert strictest(many) == OFF


class Board:
    """A switchboard, its backend and its audit log."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "switches.json"
        self.service = fake_service(folder / "tokenizer")
        self.backend: Any = self.service.backend
        assert isinstance(self.backend, FakeBackend)
        self.audit_file = folder / "audit.jsonl"
        self.board = Switchboard(self.backend, AuditLog(self.audit_file), file=self.file, max_depth=9)

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_file.read_text().splitlines()]


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def test_no_source_switches_on_what_another_switched_off(board: Board) -> None:
    board.board.start()
    assert board.backend.switches == Switches(max_depth=9)
    board.board.set("admin", Switches(max_depth=3, classes_off=frozenset({"chat"})), who="a", why="b")
    board.board.switch_off_by_signal()
    assert board.backend.switches == Switches(enabled=False, max_depth=3, classes_off=frozenset({"chat"}))
    board.board.set("admin", ALL_ON, who="a", why="all is well")
    assert not board.backend.switches.enabled
    board.board.clear_signal()
    assert board.backend.switches == Switches(max_depth=9)


def test_every_flip_is_written_down(board: Board) -> None:
    board.board.switch_off_by_signal()
    board.board.switch_off_by_signal()  # nothing new
    board.board.clear_signal()
    board.board.clear_signal()
    board.board.set("admin", OFF, who="admin key 12", why="a slow day")
    lines = board.audited()
    assert [line["who"] for line in lines] == ["signal SIGUSR1", "signal SIGUSR2", "admin key 12"]
    assert lines[2]["why"] == "a slow day"
    assert lines[2]["before"]["enabled"] is True
    assert lines[2]["after"]["enabled"] is False
    assert lines[2]["time"].endswith("+00:00")
    assert lines == board.board.audit.entries
    assert stat.S_IMODE(board.audit_file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "{",
            "[]",
            "null",
            '{"enabled": "yes"}',
            '{"enabled": 1}',
            '{"enabld": true}',
            '{"max_depth": 65}',
            "\x00",
        ),
        *('{"classes_off": "chat"}', '{"max_depth": true}', "[" * 100_000, " " * 70_000),
    ],
)
def test_file_that_cannot_be_understood_means_off(board: Board, content: str) -> None:
    board.file.write_text(content)
    board.board.start()
    assert not board.backend.switches.enabled
    assert "cannot be read or understood" in board.audited()[0]["why"]
    assert str(board.file) in board.audited()[0]["who"]


def test_file_that_is_no_file_means_off(board: Board) -> None:
    board.file.mkdir()
    assert read_file(board.file).switches == OFF  # type: ignore[union-attr]
    board.file.rmdir()
    os.mkfifo(board.file)
    assert read_file(board.file).switches == OFF  # type: ignore[union-attr]
    board.file.unlink()
    board.file.symlink_to(board.file)
    assert read_file(board.file).switches == OFF  # type: ignore[union-attr]
    board.file.unlink()
    assert read_file(board.file) is None


def test_file_is_watched(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switchboard_module, "POLL_S", 0.01)

    async def main() -> None:
        board.board.start()
        watching = asyncio.create_task(board.board.watch())
        for content, expected in (
            ('{"drafters_off": ["model"], "why": "a try"}', Switches(drafters_off=frozenset({"model"}), max_depth=9)),
            ('{"max_depth": 3}', Switches(max_depth=3)),
            ('{"max_depth": 5}', Switches(max_depth=5)),
            ("{", Switches(enabled=False, max_depth=9)),
            ("{}", Switches(max_depth=9)),
            ('{"enabled": false}', Switches(enabled=False, max_depth=9)),
            (None, Switches(max_depth=9)),
        ):
            if content is None:
                board.file.unlink()
            else:
                board.file.write_text(content)
            async with asyncio.timeout(5.0):
                while board.backend.switches != expected:
                    await asyncio.sleep(0.002)
        watching.cancel()

    asyncio.run(main())
    assert board.audited()[0]["why"] == "a try" or "understood" in board.audited()[0]["why"]
    assert board.audited()[-1]["why"] == "the file is gone"


def test_audit_log_that_cannot_be_written_fails_nobody(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "folder.jsonl")
    (tmp_path / "folder.jsonl").unlink()
    (tmp_path / "folder.jsonl").mkdir()
    for number in range(NUM_KEPT + 5):
        audit.write({"number": number})
    assert audit.num_failures == NUM_KEPT + 5
    assert [entry["number"] for entry in audit.entries] == list(range(5, NUM_KEPT + 5))
    with pytest.raises(ConfigError, match="audit log"):
        AuditLog(tmp_path / "nowhere" / "audit.jsonl")


def test_audit_log_on_a_full_disk() -> None:
    audit = AuditLog(Path("/dev/full"))
    audit.write({"what": "x"})
    assert audit.num_failures == 1


# over HTTP


def ask(service: Service, method: str, path: str, body: Any = None) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=make_app(service), client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=ADMIN) as session:
            return await session.request(method, path, json=body)

    return asyncio.run(main())


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return fake_service(tmp_path, ServerConfig(port=0, api_keys=("user-key",), admin_keys=("admin-key",)))


def test_admin_switches(service: Service) -> None:
    answer = ask(service, "POST", "/admin/v1/speculation", {"enabled": False, "why": "a test"}).json()
    assert answer["effective"]["enabled"] is False
    assert answer["sources"]["admin"]["why"] == "a test"
    assert answer["sources"]["admin"]["who"].startswith("admin key ")
    body = {"enabled": True, "classes": {"chat": False}, "drafters": {"suffix": False}, "max_depth": 2, "why": "more"}
    assert ask(service, "POST", "/admin/v1/speculation", body).status_code == 200
    assert service.backend.switches == Switches(  # type: ignore[attr-defined]
        classes_off=frozenset({"chat"}), drafters_off=frozenset({"suffix"}), max_depth=2
    )
    body = {"classes": {"chat": True}, "max_depth": None, "why": "less"}
    ask(service, "POST", "/admin/v1/speculation", body)
    assert service.backend.switches == Switches(drafters_off=frozenset({"suffix"}))  # type: ignore[attr-defined]
    answer = ask(service, "DELETE", "/admin/v1/speculation").json()
    assert answer["sources"] == {}
    assert service.backend.switches == ALL_ON  # type: ignore[attr-defined]
    seen = ask(service, "GET", "/admin/v1/speculation").json()
    assert [entry["why"] for entry in seen["history"]] == ["a test", "more", "less", "cleared"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"enabled": False},
        {"enabled": False, "why": "  "},
        {"enabled": False, "why": "\x85" + 500 * "w"},
        {"enabled": "false", "why": "x"},
        {"enabled": 0, "why": "x"},
        {"max_depth": -1, "why": "x"},
        {"max_depth": 2.5, "why": "x"},
        {"classes": ["chat"], "why": "x"},
        {"classes": {"Ä": False}, "why": "x"},
        {"classes": {f"c{number}": False for number in range(300)}, "why": "x"},
        {"drafters": {"sufix": False}, "why": "x"},
        {"disabled": True, "why": "x"},
        [],
        None,
    ],
)
def test_admin_refuses_what_is_not_clear(service: Service, body: Any) -> None:
    assert ask(service, "POST", "/admin/v1/speculation", body).status_code in (400, 422)
    assert service.backend.switches == ALL_ON  # type: ignore[attr-defined]
    assert not service.switchboard.audit.entries


def test_admin_state_and_check(service: Service) -> None:
    answer = ask(service, "GET", "/admin/v1/state")
    state = answer.json()
    assert state["state"] == "ready"
    assert state["model"]["drafters"] == ["suffix"]
    assert state["queue"] == {"num_running": 0, "num_waiting": 0, "mean_hold_s": 0.0, "is_draining": False}
    assert state["config"]["admin_keys"] == 1
    assert "admin-key" not in answer.text
    assert ask(service, "POST", "/admin/v1/check").json()["problem"] == ""


def test_admin_state_says_what_did_not_go_the_first_way(service: Service) -> None:
    assert ask(service, "GET", "/admin/v1/state").json()["fallbacks"] == []
    for sink in service.backend.sinks:  # type: ignore[attr-defined]
        sink(Fallback("drafter suffix", "switched off after 3 failures in a row"))
    (told,) = ask(service, "GET", "/admin/v1/state").json()["fallbacks"]
    assert (told["what"], told["reason"]) == ("drafter suffix", "switched off after 3 failures in a row")
