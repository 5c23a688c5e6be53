"""The state file: what is kept, and what becomes of files that are locked, damaged, full or somebody else's."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from understudy.server import store as store_module
from understudy.server.journal import Decision
from understudy.server.store import LEARNED, ControlStore, Stored, default_state_file


def decision(number: int) -> Decision:
    return Decision(float(number), "breaker", "code, suffix", "off", f"reason {number}", "controller")


def life(path: Path, work: Callable[[ControlStore], None] = lambda store: None) -> tuple[Stored, ControlStore]:
    """Open a file, do something, and close it; what was found in it, and the store as it is afterwards."""
    store = ControlStore(path)
    found = asyncio.run(store.read())
    work(store)
    store.close()
    assert not store._thread.is_alive()
    return found, store


def write_something(store: ControlStore) -> None:
    store.put("experiments", b'{"a": 1}')
    store.put("experiments", b'{"a": 2}')
    store.add(decision(1))
    store.add(decision(2))


WRITTEN = Stored({"experiments": b'{"a": 2}'}, (decision(1), decision(2)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "model.sqlite"


def aside(path: Path) -> list[Path]:
    """What was moved away."""
    return [
        file for file in path.parent.iterdir() if file.name.startswith(f"{path.name}.2") and "-wal" not in file.name
    ]


def wait_for_failure(store: ControlStore) -> None:
    ended_s = time.monotonic() + 10.0
    while not store.num_failures or store._connection is not None:
        assert time.monotonic() < ended_s
        time.sleep(0.01)


def test_what_is_written_is_found_again_and_belongs_to_its_owner_alone(path: Path) -> None:
    found, store = life(path, write_something)
    assert (found, store.num_failures) == (Stored(), 0)
    found, store = life(path)
    assert (found, store.num_failures) == (WRITTEN, 0)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    life(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_only_so_much_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_DECISIONS", 3)
    monkeypatch.setattr(store_module, "_MOST_LEARNED", 2)

    def work(store: ControlStore) -> None:
        for number in range(10):
            store.add(decision(number))
            store.put(f"{LEARNED}{number}", b"1")
        store.put("experiments", b"0")

    life(path, work)
    found, _ = life(path)
    assert found.decisions == (decision(7), decision(8), decision(9))
    assert set(found.documents) == {f"{LEARNED}8", f"{LEARNED}9", "experiments"}


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE accounts (name TEXT)")
        connection.execute("INSERT INTO accounts VALUES ('somebody')")
    connection.close()


def of_another_version(path: Path) -> None:
    life(path, write_something)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()


def with_a_broken_page(path: Path) -> None:
    life(path, lambda store: [store.add(decision(number)) for number in range(500)] and None)
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"this is no database, and never was one" * 100),
        lambda path: path.write_bytes(b"SQLite format 3\0" + os.urandom(5000)),
        lambda path: path.write_bytes(b"x"),
        foreign,
        of_another_version,
        with_a_broken_page,
    ],
)
def test_file_that_cannot_be_gone_on_with_is_moved_aside(
    path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    make(path)
    before = path.read_bytes()
    found, store = life(path, write_something)
    assert (found, store.num_failures) == (Stored(), 0)
    (moved,) = aside(path)
    assert moved.read_bytes() == before
    assert f"was moved to {moved.name}" in caplog.text
    assert life(path)[0] == WRITTEN


def test_empty_file_is_begun(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    assert life(path, write_something)[1].num_failures == 0
    assert not aside(path)
    assert life(path)[0] == WRITTEN


def test_rows_that_are_none_of_ours_cost_the_memory_and_no_more(path: Path) -> None:
    life(path, write_something)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE decisions SET what = x'00ff'")
    connection.close()
    found, store = life(path)
    assert (found, store.num_failures) == (Stored(), 1)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/full")])
def test_what_is_no_file_is_left_alone(path: Path, make: Callable[[Path], None]) -> None:
    path.parent.mkdir()
    make(path)
    found, store = life(path, write_something)
    assert found == Stored()
    assert store.num_failures == 5, "to read, and four times to write"
    assert not path.is_file()


def test_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    found, store = life(tmp_path / "file" / "state.sqlite", write_something)
    assert (found, store.num_failures) == (Stored(), 5)
    assert "serving without it" in caplog.text


def test_locked_file_costs_what_is_written_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_BUSY_S", 0.05)
    life(path, write_something)
    other = sqlite3.connect(path, isolation_level=None)

    def work(store: ControlStore) -> None:
        other.execute("BEGIN EXCLUSIVE")
        store.add(decision(3))
        wait_for_failure(store)
        other.execute("ROLLBACK")
        store.add(decision(4))

    found, store = life(path, work)
    other.close()
    assert (found, store.num_failures) == (WRITTEN, 1)
    assert life(path)[0].decisions == (decision(1), decision(2), decision(4))
    assert not aside(path), "a file that is in use is nobody's to move"


def test_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = store_module._connect

    def on_a_small_disk(path: Path) -> sqlite3.Connection:
        connection = connect(path)
        connection.execute("PRAGMA max_page_count = 8")
        return connection

    life(path, write_something)
    monkeypatch.setattr(store_module, "_connect", on_a_small_disk)
    found, store = life(path, lambda store: store.put("large", bytes(100_000)))
    assert (found, store.num_failures) == (WRITTEN, 1)
    monkeypatch.setattr(store_module, "_connect", connect)
    assert life(path)[0] == WRITTEN


def test_damage_while_it_runs_is_noticed_when_the_file_is_opened_anew(path: Path) -> None:
    def work(store: ControlStore) -> None:
        write_something(store)
        store._enqueue(_raise)
        wait_for_failure(store)
        path.write_bytes(b"overwritten" * 1000)
        store.add(decision(3))

    assert life(path, work)[1].num_failures == 1
    assert aside(path)
    assert life(path)[0].decisions == (decision(3),)


def _raise(connection: sqlite3.Connection) -> None:
    raise sqlite3.DatabaseError("database disk image is malformed")


def test_more_than_can_wait_is_dropped_and_counted(path: Path) -> None:
    store = ControlStore(path)  # its thread was never started
    for number in range(store_module._MOST_WAITING + 3):
        store.add(decision(number))
    assert store.num_failures == 3
    store.close()
    assert not path.exists()


def test_disk_that_hangs_holds_nobody_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(path: Path) -> sqlite3.Connection:
        time.sleep(0.5)
        raise OSError("it was gone")

    monkeypatch.setattr(store_module, "_open", hang)
    monkeypatch.setattr(store_module, "_READ_S", 0.05)
    began_s = time.monotonic()
    store = ControlStore(path)
    assert asyncio.run(store.read()) == Stored()
    assert time.monotonic() - began_s < 0.4
    store.close()
    assert store.num_failures == 2


def test_two_servers_may_share_a_file(path: Path) -> None:
    def work(store: ControlStore) -> None:
        _, other = life(path, lambda other: other.add(decision(2)))
        assert other.num_failures == 0
        store.add(decision(3))

    assert life(path, work)[1].num_failures == 0
    assert life(path)[0].decisions == (decision(2), decision(3))


@pytest.mark.parametrize("name", ["a" * 500, "/", "..", "../../etc/passwd", "naïve \0 name", ""])
def test_default_file_is_always_in_its_folder(tmp_path: Path, name: str) -> None:
    path = default_state_file(name, {"XDG_STATE_HOME": str(tmp_path)})
    assert path.parent == tmp_path / "understudy"
    assert path.resolve() == path
    assert len(path.name) < 128
    assert life(path, write_something)[1].num_failures == 0
