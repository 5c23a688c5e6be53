"""How a server behaves: one frozen configuration, checked at the door."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields
from pathlib import Path

from understudy.errors import ConfigError

_COUNTS = ("max_running", "max_waiting", "max_body_bytes", "max_header_bytes", "max_headers", "record_max_bytes")
_SECONDS = ("queue_timeout_s", "request_timeout_s", "body_timeout_s", "keep_alive_s", "drain_s", "record_max_age_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where it listens, whom it answers, and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    served_name: str | None = None
    """What the model is called in requests and answers; its own name if None."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens /v1. None at all: everybody is let in, and only a loopback address may be listened on."""
    admin_keys: tuple[str, ...] = ()
    """Any of them opens /admin as well. None at all: /admin answers loopback peers, if there are no api_keys either."""
    insecure: bool = False
    """Listen on a public address without a key all the same."""
    strict: bool = False
    """Refuse unknown fields instead of naming them in x-ignored-fields."""
    max_running: int = 64
    """Choices that are computed together."""
    max_waiting: int = 256
    """Requests that may wait for a place; more are refused with 503."""
    max_per_key: int | None = None
    """Requests of one key, running and waiting; more are refused with 429."""
    queue_timeout_s: float = 30.0
    """A request that got no place for this long is refused with 503."""
    request_timeout_s: float | None = None
    """An answer that is not finished this long after the request came ends with 503; None lets it take its time."""
    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    body_timeout_s: float = 30.0
    """A body that has not come for this long is given up."""
    keep_alive_s: float = 10.0
    """A stream that has nothing to say for this long sends a comment."""
    drain_s: float = 30.0
    """After SIGTERM, what runs may go on for this long."""
    max_depth: int | None = None
    """No draft reaches further than this, whatever a request or a switch allows."""
    switch_file: Path | None = None
    """A file that is watched: what it says about speculation holds."""
    audit_file: Path | None = None
    """Where every flip of a switch is written; to the log alone if None."""
    state_file: Path | None = None
    """Where it is kept what was learned, decided and tried, over a restart; None keeps nothing."""
    shadow_share: float = 0.01
    """Of the answers, those that are computed again in quiet moments, with and without drafts, and compared."""
    record_dir: Path | None = None
    record_max_bytes: int = 1 << 30
    record_max_age_s: float = 7 * 86400.0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}.", "Give a whole number of at least 1.")
        for name in _SECONDS:
            value = getattr(self, name)
            if value is None and name == "request_timeout_s":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
                raise ConfigError(f"{name} is {value!r}.", "Give a number of seconds.")
        if self.max_per_key is not None and (not isinstance(self.max_per_key, int) or self.max_per_key < 1):
            raise ConfigError(f"max_per_key is {self.max_per_key!r}.", "Give a whole number of at least 1.")
        share = self.shadow_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(f"shadow_share is {share!r}.", "Give a number from 0 to 1.")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}.", "Give a number from 0 to 65535.")
        if any(not key or not key.isascii() or not key.isprintable() for key in (*self.api_keys, *self.admin_keys)):
            raise ConfigError("A key is empty or has characters that no header can hold.", "Use printable ASCII.")
        if not (self.is_loopback or self.api_keys or self.insecure):
            raise ConfigError(
                f"Listening on {self.host} without a key would let everybody in.",
                "Set UNDERSTUDY_API_KEY or --api-key-file, listen on 127.0.0.1, or say --insecure.",
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    def described(self) -> dict[str, object]:
        """Every setting as JSON can hold it. Of keys only their number is told."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        told = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        return told | {"api_keys": len(self.api_keys), "admin_keys": len(self.admin_keys)}


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own; a name that is no address is not, but for localhost."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
