"""The frame around the commands, which are in commands/: what they need is imported when they run, so `--help` is fast.

Exit codes: 0 done; 1 the words differ, or nothing was proven; 2 the request cannot be served;
3 the time was up before the work was done; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress

from understudy import __version__
from understudy.commands.advise import add_advise
from understudy.commands.bench import add_bench
from understudy.commands.chat import add_chat
from understudy.commands.generate import add_generate
from understudy.commands.race import add_race
from understudy.commands.replay import add_replay
from understudy.commands.result import BROKEN_PIPE, FAILED, INTERRUPTED
from understudy.commands.serve import add_serve
from understudy.commands.train import add_train
from understudy.commands.verify import add_verify
from understudy.errors import UnderstudyError

_EXAMPLES = """examples:
  understudy generate "What is a lighthouse for?"
  echo "List three rivers." | understudy generate --temperature 0.7 --seed 7
  understudy generate --compare
  understudy verify --budget 300 --json proof.json
  understudy race --classes code,rag
  understudy bench --json bench.json
  understudy advise --policy policy.json
  understudy serve --port 8000 --record records
  understudy replay records
  understudy train --kind block --data prompts/ --out drafts/block --minutes 9
  understudy chat
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # no text may fail for the terminal's alphabet
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        code = BROKEN_PIPE
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (UnderstudyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = FAILED
    except MemoryError:
        print("error: There is not enough memory. Choose a smaller model or a shorter prompt.", file=sys.stderr)
        code = FAILED
    return code


def _dispatch(argv: list[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as leaving:  # argparse has said all there is to say
        return leaving.code if isinstance(leaving.code, int) else 0
    arguments.written = sys.argv[1:] if argv is None else argv
    code: int = arguments.command(arguments)
    return code


def _drop_output() -> None:
    """Let the interpreter's last flush go nowhere: the reader has left."""
    with suppress(OSError, ValueError):
        descriptor = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="understudy",
        description="Language models served faster by speculative decoding, with the same words.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"understudy {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    adders = (add_serve, add_chat, add_generate, add_verify, add_race, add_bench, add_advise, add_replay, add_train)
    for add_command in adders:
        add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
