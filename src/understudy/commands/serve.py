"""`understudy serve`: OpenAI's interface over HTTP."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from understudy.commands.result import make_console
from understudy.commands.serve_arguments import ServeSettings, declare_serve, serve_settings
from understudy.commands.teller import Teller
from understudy.core.events import Fallback, Notice
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    import socket

_EXAMPLES = """examples:
  understudy serve
  understudy serve path/to/model --draft path/to/smaller --port 8001
  UNDERSTUDY_API_KEY=secret understudy serve --host 0.0.0.0
  understudy serve --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'
  understudy serve --config server.yaml --record records

speculation while it runs:
  kill -USR1 PID         off; kill -USR2 PID takes that back
  --switch-file FILE     {"enabled": false, "why": "..."} in it; what cannot be read means off
  POST /admin/v1/speculation {"enabled": false, "why": "..."}
"""


def add_serve(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "serve",
        help="answer over HTTP, as OpenAI's interface does",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=serve)
    declare_serve(parser)


def serve(arguments: argparse.Namespace) -> int:
    """Check every option and bind the port, then load the model and answer until a signal comes."""
    import asyncio
    import logging

    import uvloop

    from understudy.server.run import listen

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("understudy.server").setLevel(logging.INFO)  # decisions are told there
    settings = serve_settings(arguments)
    with listen(settings.server) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, listener))
    return 0


async def _serve(settings: ServeSettings, listener: socket.socket) -> None:
    from understudy.server.app import make_app
    from understudy.server.run import address_of, serve
    from understudy.server.service import Service
    from understudy.server.supervisor import EngineProcess
    from understudy.terminal import Waiting

    console = make_console(stderr=True)
    address = address_of(listener)
    backend = EngineProcess(settings.model, settings.engine)
    backend.listen(Teller(console), Fallback, Notice)
    try:
        service = Service(backend, settings.server)
    except UnderstudyError:
        await backend.close()
        raise
    with Waiting(console, "loading the model") as waiting:

        def on_ready() -> None:
            waiting.stop()
            print(_ready_line(address, service.model_name, has_keys=bool(settings.server.api_keys)), flush=True)

        await serve(service, make_app(service), listener, on_ready=on_ready)


def _ready_line(address: str, model: str, *, has_keys: bool) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    key = ' -H "authorization: Bearer $UNDERSTUDY_API_KEY"' if has_keys else ""
    quoted = body.replace("'", "'\\''")
    return (
        f"ready on {address} -- curl {address}/v1/chat/completions{key} -H content-type:application/json -d '{quoted}'"
    )
