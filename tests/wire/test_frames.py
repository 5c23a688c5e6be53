import fcntl
import resource
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.config import EngineConfig
from understudy.core.backend import EngineLoad
from understudy.core.control import ClassPolicy, Policy
from understudy.core.events import Cycle
from understudy.core.request import (
    Facts,
    Grammar,
    Output,
    Request,
    SamplingParams,
    SpeculationCounts,
    TokenLogprob,
)
from understudy.core.switches import Switches
from understudy.errors import InvalidRequest
from understudy.wire.frames import (
    MOST_BYTES,
    Channel,
    Frames,
    commands,
    frame,
    pack_tally,
    reports,
    unpack_tally,
)
from understudy.wire.messages import Abort, Check, Command, Start, Stepped, Submit, Switch, Tally

REQUEST = Request(
    request_id="a",
    prompt_ids=(1, 2, 3),
    sampling=SamplingParams(
        logit_bias={7: -1.5}, stop=("x",), grammar=Grammar("regex", "a+"), seed=2**64 - 1, prompt_logprobs=2
    ),
    prediction_ids=(4, 5),
    priority=-3,
)
POLICY = Policy(
    classes={"code": ClassPolicy(max_depth=3, drafters=("suffix",), reason="é"), "chat": ClassPolicy(enabled=False)},
    model="m",
    system_fingerprint="fp_1",
)
COMMANDS: list[Command] = [
    Start(None, EngineConfig(drafters=("suffix", "ngram")), "/nowhere", Switches(classes_off=frozenset({"chat"}))),
    Start("m", EngineConfig(policy=POLICY), "/nowhere", Switches()),
    Submit(REQUEST),
    Abort("a"),
    Switch(Switches(enabled=False, max_depth=3)),
    Check(),
]
OUTPUT = Output(
    "a",
    1,
    (5, 6),
    "é",
    (TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.0))),),
    "stop",
    "x",
    sources=("suffix", ""),
    facts=Facts("chat", 2, 2**64 - 1, 32, 1, SpeculationCounts(cycles=3, reached_by_position=[2, 1])),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_arrives_as_it_was(command: Command) -> None:
    (body,) = Frames().add(frame(command))
    assert commands.decode(body) == command


def test_a_report_arrives_as_it_was() -> None:
    cycle = Cycle(1, 0, 4, 0, 3, 2, 100, 0.001, 0.006, 0.0005, 0.008, "depth", 5)
    tally = Tally(EngineLoad(1, 2, 3, 4), [cycle])
    report = Stepped([OUTPUT], pack_tally(tally))
    (body,) = Frames().add(frame(report))
    arrived = reports.decode(body)
    assert arrived == report
    assert isinstance(arrived, Stepped)
    assert unpack_tally(arrived.tally) == tally


@given(st.lists(st.integers(1, 50), max_size=40))
def test_pieces_of_any_size_make_whole_frames(cuts: list[int]) -> None:
    joined = b"".join(frame(command) for command in COMMANDS)
    frames, found, place = Frames(), [], 0
    for cut in [*cuts, len(joined)]:
        found.extend(frames.add(joined[place : place + cut]))
        place += cut
    assert [commands.decode(body) for body in found] == COMMANDS


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        list(Frames().add((MOST_BYTES + 1).to_bytes(4, "little")))
    with pytest.raises(msgspec.ValidationError):
        commands.decode(msgspec.msgpack.encode({"type": "Run", "code": "import os"}))
    with pytest.raises(msgspec.ValidationError):
        commands.decode(msgspec.msgpack.encode({"type": "Abort", "request_id": 5}))


def test_the_checks_of_plain_data_run_again_on_arrival() -> None:
    body = frame(Submit(REQUEST))[4:].replace(b"temperature", b"temperaturE")
    assert commands.decode(body).request.sampling.temperature == 1.0, "a name that is unknown is dropped"
    wrong = msgspec.msgpack.encode(
        {"type": "Submit", "request": {"request_id": "a", "prompt_ids": [1], "sampling": {"temperature": -1.0}}}
    )
    with pytest.raises((msgspec.ValidationError, InvalidRequest)):
        commands.decode(wrong)


def test_a_channel_hears_all_that_came_and_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        assert channel.receive(wait_s=0.0) == []
        ours.sendall(frame(Check()) + frame(Abort("a")) + frame(Abort("b"))[:5])
        assert channel.receive(wait_s=None) == [Check(), Abort("a")]
        ours.sendall(frame(Abort("b"))[5:])
        assert channel.receive(wait_s=None) == [Abort("b")]
        ours.close()
        with pytest.raises(EOFError):
            channel.receive(wait_s=None)


def test_a_channel_may_have_a_large_number() -> None:
    """A server with a thousand connections hands such a one to a new engine."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(limits[1], 4096)), limits[1]))
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD, 2048)) as large:
            ours.sendall(frame(Check()))
            assert Channel(large).receive(wait_s=None) == [Check()]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
