"""The messages. They carry the plain data of core/, whose own checks run again on arrival."""

from __future__ import annotations

import msgspec

from understudy.config import EngineConfig
from understudy.core.backend import EngineCheck, EngineLoad, ModelInfo
from understudy.core.control import ControlView, Learned, PassCosts
from understudy.core.events import Cycle, Decided, Fallback, Notice
from understudy.core.request import Output, Request
from understudy.core.switches import Switches


class Start(msgspec.Struct, tag=True):
    """The first message to an engine process: what to load."""

    model: str | None
    config: EngineConfig
    tokenizer_folder: str
    """An empty folder that the tokenizer is written to."""
    switches: Switches
    learned: Learned = Learned()
    """What an earlier life of it found out."""
    cost: PassCosts | None = None
    """What an earlier life of it measured, on this machine."""


class Submit(msgspec.Struct, tag=True):
    """Answer this."""

    request: Request


class Abort(msgspec.Struct, tag=True):
    """Nobody waits for this any more."""

    request_id: str


class Switch(msgspec.Struct, tag=True):
    """Obey these from the next step on."""

    switches: Switches


class Check(msgspec.Struct, tag=True):
    """Count your blocks."""


class Explain(msgspec.Struct, tag=True):
    """Say how things stand in the control plane, and what was learned."""


class Recall(msgspec.Struct, tag=True):
    """Go on from what an earlier life found out with this model."""

    learned: Learned


Command = Start | Submit | Abort | Switch | Check | Explain | Recall


class Ready(msgspec.Struct, tag=True):
    """The engine can answer."""

    info: ModelInfo
    load: EngineLoad
    cost: PassCosts
    pid: int


class Failed(msgspec.Struct, tag=True):
    """The engine cannot start, for a reason that its user can mend."""

    message: str
    remedy: str


class Refused(msgspec.Struct, tag=True):
    """A request can never be served."""

    request_id: str
    message: str
    remedy: str
    parameter: str | None
    too_large: bool


class Stepped(msgspec.Struct, tag=True):
    """One step: all that was said in it."""

    outputs: list[Output]
    tally: msgspec.Raw
    """As `frames.pack_tally` writes it. Only who counts needs it, and not at once."""


class Tally(msgspec.Struct, array_like=True):
    """What a step cost, and how full the engine was after it."""

    load: EngineLoad
    cycles: list[Cycle]


class Told(msgspec.Struct, tag=True):
    """What a user should know."""

    fallbacks: list[Fallback]
    notices: list[Notice]
    decisions: list[Decided] = []
    num_preempted: int = 0
    """Whose turn it was does not matter out here."""


class Checked(msgspec.Struct, tag=True):
    """What counting the blocks came to."""

    check: EngineCheck


class Explained(msgspec.Struct, tag=True):
    """How things stand in the control plane."""

    view: ControlView


Report = Ready | Failed | Refused | Stepped | Told | Checked | Explained
