"""Who gets in: every route, every trick with paths, bodies and headers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tests.server.served import fake_service, served, status_of, talk
from understudy.core.backend import BackendState
from understudy.server.admission import Overloaded
from understudy.server.app import ServiceDoor, make_app
from understudy.server.config import ServerConfig
from understudy.server.exchange import Caller
from understudy.server.gate import OPEN_PATHS, Gate, OpenDoor
from understudy.server.identity import caller_of, request_id_of
from understudy.server.keys import tenant_of

USER, ADMIN = "user-key", "admin-key"
KEYED = ServerConfig(port=0, api_keys=(USER, "other"), admin_keys=(ADMIN,), max_body_bytes=1000, body_timeout_s=0.3)
KEYLESS = ServerConfig(port=0, max_body_bytes=1000, body_timeout_s=0.3)


async def mirror(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with what the gate found out."""
    request = Request(scope, receive)
    caller = caller_of(request)
    answer = {
        "path": scope["path"],
        "tenant": caller.tenant,
        "is_admin": caller.is_admin,
        "is_local": caller.is_local,
        "request_id": request_id_of(request),
        "num_bytes": len(await request.body()),
    }
    await JSONResponse(answer)(scope, receive, send)


def ask(app: Any, method: str, path: str, *, client: str = "127.0.0.1", **options: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, client=(client, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as session:
            return await session.request(method, path, **options)

    return asyncio.run(main())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def inner_routes(app: Any) -> list[tuple[str, str]]:
    """Every route and method of the application behind the gate, with something in place of each parameter."""
    while not hasattr(app, "routes"):
        app = app._app
    found = []
    for route in iter_route_contexts(app.routes):
        path = re.sub(r"\{[^}]*\}", "x", route.path or "")
        found += [(path, method) for method in sorted(route.methods or {"GET"})]
    return found


def test_every_route_needs_its_key(tmp_path: Path) -> None:
    app = make_app(fake_service(tmp_path, KEYED))
    routes = inner_routes(app)
    assert ("/admin/v1/speculation", "POST") in routes
    for path, method in [*routes, ("/", "GET"), ("/nowhere", "POST"), ("/admin", "GET"), ("/metrics", "GET")]:
        statuses = {
            who: ask(app, method, path, headers=headers).status_code
            for who, headers in {
                "none": {},
                "wrong": bearer("wrong"),
                "user": bearer(USER),
                "admin": bearer(ADMIN),
            }.items()
        }
        if path in OPEN_PATHS:
            assert 401 not in statuses.values(), path
            continue
        assert statuses["none"] == statuses["wrong"] == 401, (path, method)
        assert statuses["admin"] not in (401, 403), (path, method)
        assert (statuses["user"] == 403) == path.startswith("/admin"), (path, method)
        assert statuses["user"] != 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"bearer {USER}"}, 200),
        ({"authorization": f"BEARER   {USER} "}, 200),
        ({"x-api-key": USER}, 200),
        ({"x-api-key": "other"}, 200),
        ({"authorization": f"Basic {USER}"}, 401),
        ({"authorization": f"Basic {USER}", "x-api-key": USER}, 401),
        ({"authorization": USER}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": f"Bearer {USER},{ADMIN}"}, 401),
        ({"authorization": f"Bearer {USER[:-1]}"}, 401),
        ({"authorization": f"Bearer {USER}x"}, 401),
        ({"authorization": b"Bearer \xff\xfe"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
def test_keys(headers: dict[str, Any], status: int) -> None:
    answer = ask(Gate(mirror, KEYED), "GET", "/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.json()["error"]["type"] == "authentication_error"
        assert USER not in answer.text


def test_tenants_differ_by_key_and_do_not_show_it() -> None:
    gate = Gate(mirror, KEYED)
    tenants = [ask(gate, "GET", "/v1/x", headers=bearer(key)).json()["tenant"] for key in (USER, "other", ADMIN)]
    assert tenants == [tenant_of(USER), tenant_of("other"), tenant_of(ADMIN)]
    assert len(set(tenants)) == 3
    assert all(len(tenant) == 16 and int(tenant, 16) for tenant in tenants)
    assert ask(Gate(mirror, KEYLESS), "GET", "/v1/x").json()["tenant"] == ""


def test_headers_of_every_answer() -> None:
    for config, path in ((KEYED, "/v1/x"), (KEYLESS, "/v1/x"), (KEYLESS, "/health")):
        answer = ask(Gate(mirror, config), "GET", path)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-request-id"].startswith("req-")
        assert "access-control-allow-origin" not in answer.headers
        assert ("cache-control" in answer.headers) == (path != "/health")


@pytest.mark.parametrize(("theirs", "kept"), [("abc-1.2:3", True), ("x" * 65, False), ("a b", False), ("", False)])
def test_request_id(theirs: str, kept: bool) -> None:
    answer = ask(Gate(mirror, KEYLESS), "GET", "/v1/x", headers={"x-request-id": theirs})
    assert (answer.headers["x-request-id"] == theirs) == kept
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("client", "headers", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("::1", {"host": "[::1]:8000"}, 200),
        ("::ffff:127.0.0.1", {"host": "localhost"}, 200),
        ("127.0.0.1", {"origin": "http://127.0.0.1:8000"}, 200),
        ("10.0.0.7", {}, 403),
        ("10.0.0.7", {"x-forwarded-for": "127.0.0.1"}, 403),
        ("127.0.0.1", {"x-forwarded-for": "127.0.0.1"}, 403),
        ("127.0.0.1", {"forwarded": "for=10.0.0.7"}, 403),
        ("127.0.0.1", {"origin": "http://evil.example"}, 403),
        ("127.0.0.1", {"origin": "null"}, 403),
        ("127.0.0.1", {"origin": "http://127.0.0.1:3000"}, 403),
        ("127.0.0.1", {"host": "evil.example"}, 403),
        ("127.0.0.1", {"host": "evil.example:8000", "origin": "http://evil.example:8000"}, 403),
        ("127.0.0.1", {"host": "127.0.0.1.evil.example"}, 403),
        ("127.0.0.1", {"host": "127.0.0.1/?#evil"}, 403),
        ("127.0.0.1", {"host": "localhost@evil.example"}, 403),
        ("127.0.0.1", {"host": "[::1"}, 403),
        ("127.0.0.1", {"host": ""}, 403),
        ("127.0.0.1", {"sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_admin_without_keys_is_for_this_machine(client: str, headers: dict[str, str], status: int) -> None:
    gate = Gate(mirror, KEYLESS)
    assert ask(gate, "POST", "/admin/v1/x", client=client, headers=headers).status_code == status
    answer = ask(gate, "POST", "/v1/x", client=client, headers=headers)
    assert answer.status_code == 200, "everybody is let in to /v1"


def test_admin_key_alone_closes_admin_and_leaves_the_rest_open() -> None:
    gate = Gate(mirror, ServerConfig(admin_keys=(ADMIN,)))
    assert ask(gate, "GET", "/v1/x").status_code == 200
    assert ask(gate, "GET", "/v1/x").json()["is_admin"] is False
    assert ask(gate, "GET", "/admin/v1/x").status_code == 401
    assert ask(gate, "GET", "/admin/v1/x", headers=bearer(ADMIN)).status_code == 200


def test_an_admin_is_sent_away_like_others_unless_it_is_more_urgent() -> None:
    """Without keys everybody on this machine is one: under a flood they must not be parsed and tokenized in vain."""

    class FullHouse:
        def check(self, tenant: str) -> None:
            raise Overloaded("The queue is full.", cause="queue_full", retry_after_s=1.0)

    door = ServiceDoor(cast(Any, SimpleNamespace(admission=FullHouse())), cast(Any, None))
    admin, user = Caller("a", is_admin=True), Caller("u", is_admin=False)
    chat, urgent = b'{"messages": []}', b'{"messages": [], "priority": -1}'

    def is_let_in(path: str, caller: Caller, body: bytes | None) -> bool:
        try:
            door.check(path, caller, body)
        except Overloaded:
            return False
        return True

    assert not is_let_in("/v1/completions", user, None), "before its body is read"
    assert is_let_in("/v1/completions", admin, None), "its body may say that it is urgent"
    assert not is_let_in("/v1/completions", admin, chat)
    assert is_let_in("/v1/completions", admin, urgent)
    assert is_let_in("/v1/models", user, None)
    assert is_let_in("/v1/models", admin, chat)


def test_api_keys_alone_close_admin_for_everybody() -> None:
    gate = Gate(mirror, ServerConfig(api_keys=(USER,)))
    assert ask(gate, "GET", "/admin/v1/x", headers=bearer(USER)).status_code == 403
    assert ask(gate, "GET", "/admin/v1/x").status_code == 401


def test_while_the_model_is_loaded() -> None:
    door = OpenDoor()
    door.state = BackendState("starting")
    gate = Gate(mirror, KEYED, door=door)
    answer = ask(gate, "POST", "/v1/x", headers=bearer(USER))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["error"]["code"] == "engine_restarting"
    assert ask(gate, "POST", "/v1/x").status_code == 401
    assert ask(gate, "GET", "/health").status_code == 200
    assert ask(gate, "GET", "/admin/v1/state", headers=bearer(ADMIN)).status_code == 200


def test_bug_behind_the_gate_shows_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a secret")

    answer = ask(Gate(broken, KEYLESS), "GET", "/v1/x", headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_error"
    assert "secret" not in answer.text
    assert "request mine failed" in caplog.text


# over a real socket


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with served(Gate(mirror, KEYED), KEYED) as address:
        yield address


def request_line(target: str, *headers: str, method: str = "GET") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Connection: close", *headers]
    if not any(header.lower().startswith("host:") for header in headers):
        lines.append("Host: x")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("/v1/models", "x"),
        ("//v1/models", "x"),
        ("/v1//models", "x"),
        ("/health/../v1/models", "x"),
        ("/health/%2e%2e/v1/models", "x"),
        ("/%2e/v1/models", "x"),
        ("/health%2f..%2fv1/models", "x"),
        ("/health%00/v1", "x"),
        ("/health;/v1/models", "x"),
        ("/HEALTH", "x"),
        ("/health/", "x"),
        ("http://x/v1/models", "x"),
        ("http://x/health", "x"),
        ("/v1/models", "x/health?"),
        ("/v1/models", "x/health#"),
        ("/v1/models?/health", "x"),
        ("/v1/models#/health", "x"),
        ("*", "x"),
    ],
)
def test_no_path_gets_past_the_key(address: tuple[str, int], target: str, host: str) -> None:
    answer = talk(address, request_line(target, f"Host: {host}"))
    assert status_of(answer) in (400, 401), answer


@pytest.mark.parametrize("target", ["/admin/v1/x", "/%61dmin/v1/x", "/admin/", "/admin", "/admin/../admin/v1/x"])
def test_user_key_does_not_open_admin(address: tuple[str, int], target: str) -> None:
    assert status_of(talk(address, request_line(target, f"Authorization: Bearer {USER}"))) == 403


@pytest.mark.parametrize("target", ["//admin/v1/x", "/v1/../admin/v1/x", "/%2561dmin/v1/x", "http://x/admin/v1/x"])
def test_what_is_not_seen_as_admin_is_not_routed_there(tmp_path: Path, target: str) -> None:
    app = make_app(fake_service(tmp_path, KEYED))
    real = target.replace("/v1/x", "/v1/state")
    with served(app, KEYED) as address:
        assert status_of(talk(address, request_line(real, f"Authorization: Bearer {USER}"))) == 404


def test_health_is_open_and_takes_no_body(address: tuple[str, int]) -> None:
    assert status_of(talk(address, request_line("/health"))) == 200
    assert status_of(talk(address, request_line("/health?deep=1"))) == 200
    assert status_of(talk(address, request_line("/ready", "Content-Length: 1", method="POST"), b"x")) == 413


def body_request(*headers: str) -> bytes:
    return request_line("/v1/x", f"Authorization: Bearer {USER}", *headers, method="POST")


def test_body_within_the_limit(address: tuple[str, int]) -> None:
    answer = talk(address, body_request("Content-Length: 1000"), b"x" * 600, b"x" * 400)
    assert status_of(answer) == 200
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["num_bytes"] == 1000


def test_body_over_the_limit_is_refused_before_it_is_read(address: tuple[str, int]) -> None:
    answer = talk(address, body_request("Content-Length: 1001"))
    assert status_of(answer) == 413
    assert b"payload_too_large" in answer
    answer = talk(address, body_request("Content-Length: 10000000", "Expect: 100-continue"))
    assert status_of(answer) == 413


def test_chunked_body_is_counted(address: tuple[str, int]) -> None:
    chunk = b"190\r\n" + b"x" * 400 + b"\r\n"
    whole = talk(address, body_request("Transfer-Encoding: chunked"), chunk, chunk, b"0\r\n\r\n")
    assert status_of(whole) == 200
    answer = talk(address, body_request("Transfer-Encoding: chunked"), chunk, chunk, chunk, b"0\r\n\r\n")
    assert status_of(answer) == 413


def test_length_and_chunks_together_are_no_way_to_smuggle(address: tuple[str, int]) -> None:
    smuggled = b"0\r\n\r\n" + request_line("/admin/v1/x", f"Authorization: Bearer {USER}")
    answer = talk(address, body_request("Content-Length: 5", "Transfer-Encoding: chunked"), smuggled)
    assert answer.count(b"HTTP/1.1 ") == 1


def test_slow_body_is_given_up(address: tuple[str, int]) -> None:
    answer = talk(address, body_request("Content-Length: 100"), b"x")
    assert status_of(answer) == 408
    assert b"request_timeout" in answer


def test_body_of_a_stranger_is_not_read(address: tuple[str, int]) -> None:
    answer = talk(address, request_line("/v1/x", "Content-Length: 900", method="POST"))
    assert status_of(answer) == 401


def test_number_and_size_of_headers(address: tuple[str, int]) -> None:
    answer = talk(address, request_line("/health", *(f"x-{number}: 1" for number in range(99))))
    assert status_of(answer) == 431
    answer = talk(address, request_line("/health", "x-long: " + "x" * (KEYED.max_header_bytes + 1000)))
    assert status_of(answer) == 431
    answer = talk(address, b"GET /health HTTP/1.1\r\nHost: x\r\nx-long: ", *[b"x" * 8192] * 8)
    assert status_of(answer) == 400
    assert b"invalid_http" in answer


def test_head_that_never_ends_is_given_up(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.server.connection.HEAD_TIMEOUT_S", 0.2)
    assert talk(address, b"GET /health HTTP/1.1\r\nHost: x\r\n", timeout_s=3.0) == b""
    first = request_line("/health").replace(b"Connection: close\r\n", b"")
    assert status_of(talk(address, first, timeout_s=3.0)) == 200


@pytest.mark.parametrize("rubbish", [b"\x16\x03\x01\r\n\r\n", b"GET\r\n\r\n", b"\r\n\r\n", b"GET / HTTP/9\r\n\r\n"])
def test_rubbish_is_answered_or_hung_up_on(
    address: tuple[str, int], rubbish: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.server.connection.HEAD_TIMEOUT_S", 0.2)
    answer = talk(address, rubbish, timeout_s=3.0)
    assert answer == b"" or status_of(answer) == 400


def test_other_protocols_are_refused() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    asyncio.run(Gate(mirror, KEYLESS)({"type": "websocket", "path": "/v1/x", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_whoever_could_not_be_taken_on_is_sent_away_before_the_body_is_read() -> None:
    class Full(OpenDoor):
        def __init__(self) -> None:
            self.codes: list[str] = []

        def check(self, path: str, caller: Caller, body: bytes | None) -> None:
            if path == "/v1/x" or body == b"too much":
                raise Overloaded("The queue is full.", cause="queue_full", retry_after_s=2.4)

        def refused(self, code: str) -> None:
            self.codes.append(code)

    door = Full()
    gate = Gate(mirror, KEYLESS, door=door)
    answer = ask(gate, "POST", "/v1/x")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert answer.json()["error"]["code"] == "overloaded"
    assert ask(gate, "POST", "/v1/y").status_code == 200
    assert door.codes == ["overloaded"]
    answer = ask(gate, "POST", "/v1/y", content=b"too much")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert "connection" not in answer.headers, "what was read whole need not be cut off"
