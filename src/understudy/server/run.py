"""A server's life: it listens, loads, answers, and leaves in order.

The port is bound first, so that health can be asked for while the model is loaded. The first SIGTERM or SIGINT lets
what runs go on for a while and takes nobody else; the second ends it at once. Either way every open stream hears the
end, the engine's process is gone, and the exit is clean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from understudy.errors import ConfigError
from understudy.server.config import ServerConfig
from understudy.server.connection import Connection
from understudy.server.service import Service
from understudy.upkeep import calm_process

log = logging.getLogger("understudy.server")

KEEP_ALIVE_S = 30
_FLUSH_S = 5
"""What was said last has this long to be read."""
_TICK_S = 0.05
_MOST_FILES = 65536
_BACKLOG = 2048
_NICENESS = 10


class _Web(uvicorn.Server):
    """uvicorn without its signal handlers: the life around it decides when it ends.

    It does not wake ten times a second to see whether it should end: the engine is busy on these cores, and every
    wake-up finds cold caches. Connections look at the clock for the date of their answers.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Return when it was told to leave."""
        await self._ended.wait()

    def leave(self) -> None:
        """Take no more connections, let those that are open finish, and end."""
        self.should_exit = True
        self._ended.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


async def serve(
    service: Service, app: ASGIApp, listener: socket.socket, *, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until a signal says otherwise. An engine that cannot be started at all is raised."""
    await Life(service, app, listener).run(on_ready)


class Life:
    """One server, from its first signal handler to its last."""

    def __init__(self, service: Service, app: ASGIApp, listener: socket.socket) -> None:
        self._service = service
        self._listener = listener
        self._web = _Web(_web_config(app, service.config))
        self._leave = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Do all of it, in order."""
        service = self._service
        _raise_file_limit()
        with self._signals():
            await service.keeper.open()
            service.switchboard.start()
            beside = [
                asyncio.create_task(watch)
                for watch in (service.switchboard.watch(), service.keeper.watch(), service.shadows.run())
            ]
            web = asyncio.create_task(self._web.serve(sockets=[self._listener]))
            web.add_done_callback(lambda _: self.stop())  # nothing is left to wait for
            try:
                if await self._load():
                    on_ready()
                    await self._leave.wait()
                    await self._drain()
            finally:
                await service.keeper.refresh()
                # the engine first: every stream that is still open hears that it ends
                await service.backend.close()
                self._web.leave()
                await web
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
                await service.keeper.close()
                if service.recorder is not None:
                    await asyncio.to_thread(service.recorder.close)

    def stop(self) -> None:
        """Leave in order; called again, at once."""
        if self._leave.is_set():
            self._hurry.set()
        self._leave.set()

    async def _load(self) -> bool:
        """Start the engine; False if the server was told to leave before it was ready."""
        starting = asyncio.create_task(self._service.backend.start())
        leaving = asyncio.create_task(self._leave.wait())
        try:
            await asyncio.wait({starting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting  # raises what went wrong
                self._service.keeper.recall()
                _ = self._service.tokenizer  # read before anybody waits for it
                calm_process()
                _give_way()
            return starting.done()
        finally:
            for task in (starting, leaving):
                task.cancel()
            await asyncio.gather(starting, leaving, return_exceptions=True)

    async def _drain(self) -> None:
        """Take nobody on, and wait for those who run."""
        admission = self._service.admission
        admission.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._service.config.drain_s):
                while admission.num_running and not self._hurry.is_set():
                    await asyncio.sleep(_TICK_S)
        if admission.num_running:
            log.warning("%d choices were cut off by the server's end", admission.num_running)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop, switchboard = asyncio.get_running_loop(), self._service.switchboard
        handlers = {
            signal.SIGTERM: self.stop,
            signal.SIGINT: self.stop,
            signal.SIGUSR1: switchboard.switch_off_by_signal,
            signal.SIGUSR2: switchboard.clear_signal,
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)


def listen(config: ServerConfig) -> socket.socket:
    """Bind the address, or say why that cannot be."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"There is no address {config.host}: {error.strerror}.", "Choose one with --host.") from None
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Port {config.port} of {config.host} cannot be listened on: {error.strerror}.",
            "Choose another with --port, or stop what listens there.",
        ) from None
    return listener


def address_of(listener: socket.socket) -> str:
    """Where a client on this machine finds it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _web_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a peer may not choose its own address
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=_FLUSH_S,
        h11_max_incomplete_event_size=config.max_header_bytes,
    )


def _give_way() -> None:
    """Let the engine compute first where both want the same core.

    This thread wakes for every step to say a few words, and would each time push one of the engine's threads aside,
    for which all the others then wait. It needs a few hundredths of a core, which it also gets so.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)  # on Linux: of this thread, and of those that it starts


def _raise_file_limit() -> None:
    """Every connection is an open file, and the usual limit is small."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
