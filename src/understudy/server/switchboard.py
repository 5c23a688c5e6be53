"""The kill switch: what each source says about speculation, and the strictest of it, which holds.

Sources are an admin's POST, a watched file, signals, the configuration, the windows of an experiment, and parity: a
shadow run that found other words (shadow.py). Each keeps its own state, so none can switch on what another has switched
off. A file that is there and cannot be read or understood means off; a file that is not there says nothing: deleting it
is how one clears it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pwd
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from understudy.core.backend import Backend
from understudy.core.events import Decided
from understudy.core.switches import ALL_ON, MOST_NAMES, OFF, Switches
from understudy.server.audit import AuditLog

log = logging.getLogger("understudy.server")

Source = Literal["config", "admin", "file", "signal", "experiment", "parity"]

POLL_S = 0.5
_MOST_FILE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Setting:
    """What one source says."""

    switches: Switches
    who: str
    why: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """What the watched file holds."""

    enabled: bool = True
    classes_off: frozenset[str] = frozenset()
    drafters_off: frozenset[str] = frozenset()
    max_depth: int | None = None
    why: str = ""


class Switchboard:
    """Tells a backend what is switched off, and the audit log who did it."""

    def __init__(
        self, backend: Backend, audit: AuditLog, *, file: Path | None = None, max_depth: int | None = None
    ) -> None:
        self._backend = backend
        self._file = file
        self._settings: dict[Source, Setting] = {}
        self.audit = audit
        self.on_change: Callable[[Switches, Source], None] = lambda switches, source: None
        """Hears what holds, whenever a source says something else."""
        self.on_decision: Callable[[Decided, str], None] = lambda decided, who: None
        """Hears the same as a decision, and who made it."""
        if max_depth is not None:
            self._settings["config"] = Setting(Switches(max_depth=max_depth), "configuration", "")

    @property
    def effective(self) -> Switches:
        """What holds: the strictest of all sources."""
        return strictest(setting.switches for setting in self._settings.values())

    @property
    def settings(self) -> dict[Source, Setting]:
        """What each source says that says something."""
        return dict(self._settings)

    def set(self, source: Source, switches: Switches, *, who: str, why: str) -> None:
        """Let a source say something else, and obey at once."""
        self._change(source, Setting(switches, who, why), who, why)

    def clear(self, source: Source, *, who: str, why: str) -> None:
        """Let a source say nothing any more."""
        if source in self._settings:
            self._change(source, None, who, why)

    def try_out(self, switches: Switches | None, *, who: str) -> None:
        """Let the running experiment say something else, or nothing. Its start was audited; its windows are not."""
        setting = None if switches is None else Setting(switches, who, "a window of an experiment")
        if setting != self._settings.get("experiment"):
            self._obey("experiment", setting)

    def _change(self, source: Source, setting: Setting | None, who: str, why: str) -> None:
        before = self.effective
        after = self._obey(source, setting)
        self.on_decision(Decided("switch", source, summary(after), why), who)
        self.audit.write(
            {"who": who, "source": source, "why": why, "before": described(before), "after": described(after)}
        )

    def _obey(self, source: Source, setting: Setting | None) -> Switches:
        """What holds now that a source says something else, or nothing."""
        if setting is None:
            del self._settings[source]
        else:
            self._settings[source] = setting
        after = self.effective
        self._backend.switch(after)
        self.on_change(after, source)
        return after

    # signals

    def switch_off_by_signal(self) -> None:
        """SIGUSR1."""
        if "signal" not in self._settings:
            self.set("signal", OFF, who="signal SIGUSR1", why="a signal was sent")

    def clear_signal(self) -> None:
        """SIGUSR2."""
        self.clear("signal", who="signal SIGUSR2", why="a signal was sent")

    # parity, which outlives the server

    def export(self) -> dict[str, str] | None:
        """What parity says, to be kept; None if nothing."""
        setting = self._settings.get("parity")
        return None if setting is None else {"who": setting.who, "why": setting.why}

    def restore(self, state: dict[str, str] | None) -> None:
        """Say again what was kept."""
        if state is not None:
            self.set("parity", OFF, who=str(state["who"]), why=str(state["why"]))

    # the file

    def start(self) -> None:
        """Say what holds from the start, before there is an engine."""
        self._backend.switch(self.effective)
        if self._file is not None:
            if not self._file.exists():
                log.warning("the switch file %s is not there yet: it says nothing", self._file)
            self._obey_file(read_file(self._file))

    async def watch(self) -> None:
        """Look into the file again and again, for ever. It is read in a thread: a disk that hangs stops nobody."""
        if self._file is None:
            return
        while True:
            await asyncio.sleep(POLL_S)
            self._obey_file(await asyncio.to_thread(read_file, self._file))

    def _obey_file(self, setting: Setting | None) -> None:
        if setting is None:
            self.clear("file", who=f"file {self._file}", why="the file is gone")
        elif setting != self._settings.get("file"):
            self.set("file", setting.switches, who=setting.who, why=setting.why)


def strictest(all_switches: Iterable[Switches]) -> Switches:
    """Off wins, sets are united, of depths the least counts. More names than can be told are off altogether."""
    every = list(all_switches)
    depths = [switches.max_depth for switches in every if switches.max_depth is not None]
    classes: frozenset[str] = frozenset().union(*(switches.classes_off for switches in every))
    drafters: frozenset[str] = frozenset().union(*(switches.drafters_off for switches in every))
    if max(len(classes), len(drafters)) > MOST_NAMES:
        return OFF
    return Switches(
        enabled=all(switches.enabled for switches in every),
        classes_off=classes,
        drafters_off=drafters,
        max_depth=min(depths, default=None),
    )


def described(switches: Switches) -> dict[str, object]:
    """Switches as JSON can hold them."""
    return {
        "enabled": switches.enabled,
        "classes_off": sorted(switches.classes_off),
        "drafters_off": sorted(switches.drafters_off),
        "max_depth": switches.max_depth,
    }


def summary(switches: Switches) -> str:
    """Switches in a word or two."""
    if switches == ALL_ON:
        return "on"
    return "partly off" if switches.enabled else "off"


def read_file(path: Path) -> Setting | None:
    """What the file says; None if there is none. Whatever goes wrong means off."""
    who = f"file {path}"
    try:
        content, owner = _read(path)
        who = f"file {path} of {owner}"
        said = msgspec.json.decode(content, type=_File)
        switches = Switches(
            enabled=said.enabled,
            classes_off=said.classes_off,
            drafters_off=said.drafters_off,
            max_depth=said.max_depth,
        )
        return Setting(switches, who, said.why)
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever it is, it must not end the watch, and it must not leave drafting on
        return Setting(OFF, who, f"the file cannot be read or understood: {error}")


def _read(path: Path) -> tuple[bytes, str]:
    """Content and owner. What is no plain file is not read: it might never end, or never begin."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_FILE_BYTES:
            raise ValueError("it is no file, or far too long")
        owner = str(status.st_uid)
        with contextlib.suppress(KeyError):
            owner = pwd.getpwuid(status.st_uid).pw_name
        return file.read(_MOST_FILE_BYTES), owner
