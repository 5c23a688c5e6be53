"""A chat with a server: piped, at a terminal, and where something goes wrong."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.bench.fake_server import Behaviour, fake_server
from understudy.cli import main
from understudy.commands import chat

Run = Callable[..., tuple[int, str, str]]

BLOCK = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 0.375,
    "acceptance_histogram": [0, 1, 1, 0, 0],
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 8,
    "num_spec_tokens": 4,
}


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(text: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = main(["chat", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_every_line_is_a_question_and_the_conversation_is_kept(piped: Run) -> None:
    with fake_server(Behaviour(metrics={"speculative_decoding": BLOCK})) as server:
        code, out, err = piped("Count.\n\nAgain.\n", "--url", server.url, "--system", "Be brief.")
    assert code == 0
    assert out == "one two three\n" * 2, "answers alone, without colours or prompts"
    first, second = server.bodies
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}]
    assert second["messages"][1:] == [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "one two three"},
        {"role": "user", "content": "Again."},
    ]
    assert first["model"] == "fake"
    assert first["stream"] is True
    assert first["include_metrics"] is True
    assert not {"temperature", "seed", "max_tokens", "speculation"} & set(first), "left to the server"
    assert "6 tokens in" in err
    assert "tokens/s" in err
    assert "first after" in err
    assert "2.00 tokens per cycle" in err, "six words, three of them drafted: three cycles"
    assert "3 of 8 drafted tokens accepted" in err


def test_server_that_tells_nothing_of_speculation_is_summed_up_without(piped: Run) -> None:
    with fake_server() as server:
        _, _, err = piped("Count.\n", "--url", server.url)
    assert "6 tokens in" in err
    assert "accepted" not in err


def test_options_and_commands_say_how_answers_are_drawn(piped: Run) -> None:
    options = ("--temperature", "0.5", "--seed", "3", "--max-tokens", "9", "--no-speculation", "--model", "mine")
    lines = ["a", "/temperature 0", "/seed 18446744073709551615", "/speculation on", "b", "/reset", "c", "/exit", "d"]
    with fake_server() as server:
        code, _, err = piped("\n".join(lines), "--url", server.url, *options)
    assert code == 0
    first, second, third = server.bodies
    assert (first["temperature"], first["seed"], first["max_tokens"]) == (0.5, 3, 9)
    assert first["speculation"] == {"enabled": False}
    assert first["model"] == "mine"
    assert (second["temperature"], second["seed"]) == (0.0, 2**64 - 1)
    assert "speculation" not in second
    assert len(second["messages"]) == 3
    assert len(third["messages"]) == 1
    assert "forgotten" in err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/seed x", "takes a number, not 'x'"),
        ("/seed -1", "seed is -1"),
        ("/temperature", "takes a number"),
        ("/temperature nan", "temperature is nan"),
        ("/speculation maybe", "is no command"),
        ("/etc/passwd", "is no command"),
        ("/help", "/reset forgets"),
    ],
)
def test_commands_that_make_no_sense_change_nothing(piped: Run, line: str, told: str) -> None:
    with fake_server() as server:
        code, _, err = piped(f"{line}\nquestion\n /as it is\n", "--url", server.url)
    assert code == 0
    assert told in err
    first, second = server.bodies
    assert not {"temperature", "seed", "speculation"} & set(first)
    assert second["messages"][-1]["content"] == "/as it is"


def test_what_a_terminal_would_obey_is_written_as_text(piped: Run) -> None:
    with fake_server(Behaviour(words=["\x1b]0;owned\x07", "[red]text  "])) as server:
        _, out, _ = piped("Hello.\n", "--url", server.url)
    assert out == "\ufffd]0;owned\ufffd[red]text  \n"


def test_failed_question_is_told_and_forgotten(piped: Run) -> None:
    with fake_server(Behaviour(status=400)) as server:
        code, out, err = piped("a\nb\n", "--url", server.url, "--model", "fake")
    assert code == 2
    assert out == ""
    assert err.count("answered 400") == 2
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]


def test_answer_that_breaks_off_is_told(piped: Run) -> None:
    with fake_server(Behaviour(fail_from=0)) as server:
        code, out, err = piped("a\n", "--url", server.url)
    assert code == 2
    assert out.startswith("one ")
    assert "the stream ended before the answer did" in err


def test_without_a_server_the_error_says_how_to_start_one(piped: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "DEFAULT_URL", "http://127.0.0.1:9/v1")
    code, _, err = piped("a\n")
    assert code == 2
    assert "understudy serve" in err
    code, _, err = piped("a\n", "--url", "http://127.0.0.1:9/v1")
    assert code == 2
    assert "cannot be reached" in err


def test_key_comes_from_the_environment(piped: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_API_KEY", "ours")
    monkeypatch.setenv("MINE", "mine")
    with fake_server() as server:
        piped("a\n", "--url", server.url)
        piped("a\n", "--url", server.url, "--api-key-env", "MINE")
        monkeypatch.setattr(chat, "DEFAULT_URL", server.url)
        piped("a\n")
        code, _, err = piped("a\n", "--api-key-env", "NOT_SET")
    assert server.keys == [None, "Bearer mine", "Bearer ours"], "our own key goes to no other server unasked"
    assert code == 2
    assert "NOT_SET is not set" in err


def test_settings_that_no_server_takes_are_refused_before_anybody_is_asked(piped: Run) -> None:
    code, _, err = piped("a\n", "--temperature", "-1")
    assert code == 2
    assert "temperature" in err


@dataclass
class Terminal:
    """A chat in a process of its own, at a terminal of its own."""

    arguments: list[str]
    seen: str = ""
    _process: subprocess.Popen[bytes] = field(init=False)
    _end: int = field(init=False)

    def __enter__(self) -> Terminal:
        self._end, theirs = pty.openpty()
        code = (
            "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "signal.signal(signal.SIGINT, signal.default_int_handler); "  # ignored in what a shell starts beside it
            "from understudy.cli import main; sys.exit(main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", code, "chat", *self.arguments]
        environment = os.environ | {"TERM": "dumb", "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
        )
        os.close(theirs)
        return self

    def __exit__(self, *details: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._end)

    def press(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def wait_for(self, text: str) -> None:
        """Read on until a text was written after all that was waited for before."""
        assert self._comes(text, 20.0), f"{text!r} did not come: {self.seen!r}"

    def interrupt(self, until: str) -> None:
        """Press Ctrl-C until a text comes: the interpreter may miss one just before it waits for keys."""
        for _ in range(10):
            self.press("\x03")
            if self._comes(until, 1.0):
                return
        raise AssertionError(f"{until!r} did not come: {self.seen!r}")

    def _comes(self, text: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if select.select([self._end], [], [], left)[0]:
                self.seen += os.read(self._end, 4096).decode()
        self.seen = self.seen.partition(text)[2]
        return True

    def code(self) -> int:
        return self._process.wait(20)


def test_at_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_leaves() -> None:
    slow: dict[str, Any] = {"words": ["word "] * 400, "seconds_per_word": 0.05}
    with fake_server(Behaviour(**slow)) as server, Terminal(["--url", server.url]) as terminal:
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for("> ")
        terminal.press("half a li")
        terminal.wait_for("half a li")
        terminal.interrupt(until="> ")
        terminal.press("Go on and on.\n")
        terminal.wait_for("word word ")
        terminal.interrupt(until="stopped")
        terminal.wait_for("> ")
        server.words = ["done"]
        terminal.press("Now stop.\n")
        terminal.wait_for("done")
        terminal.wait_for("tokens/s")
        terminal.wait_for("> ")
        terminal.press("\x04")
        assert terminal.code() == 0
    first, second = server.bodies
    assert first["messages"][-1]["content"] == "Go on and on."
    assert second["messages"][1]["content"].startswith("word word "), "what was said before the interruption is kept"
