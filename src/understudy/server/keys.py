"""Keys: where they come from, and whether one that is presented is among them.

A key is compared by its digest, in the same time whether it is right, nearly right or wrong. It never comes from the
command line, which every user of a machine can read.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from understudy.errors import ConfigError

log = logging.getLogger("understudy.server")

API_KEY_VARIABLE = "UNDERSTUDY_API_KEY"
ADMIN_KEY_VARIABLE = "UNDERSTUDY_ADMIN_KEY"
_MOST_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of a key."""

    tenant: str
    """Derived from the key, and does not show it."""
    is_admin: bool


class KeyRing:
    """All keys of a server, as digests."""

    def __init__(self, api_keys: tuple[str, ...], admin_keys: tuple[str, ...]) -> None:
        owners = {key: Identity(tenant_of(key), is_admin=False) for key in api_keys}
        owners |= {key: Identity(tenant_of(key), is_admin=True) for key in admin_keys}  # a key of both kinds is admin
        self._owners = [(_digest(key.encode()), owner) for key, owner in owners.items()]

    def owner_of(self, presented: bytes) -> Identity | None:
        """Whose key this is. Every key is compared, so that the time taken tells nothing."""
        digest = _digest(presented)
        found: Identity | None = None
        for known, owner in self._owners:
            if hmac.compare_digest(known, digest):
                found = owner
        return found


def tenant_of(key: str) -> str:
    """What caches and learned drafts are kept apart by."""
    return hashlib.sha256(f"tenant{key}".encode()).hexdigest()[:16]


def collect_keys(environment: Mapping[str, str], variable: str, file: Path | None) -> tuple[str, ...]:
    """The keys of a variable, with commas between, and of a file, one on each line."""
    named = [key.strip() for key in environment.get(variable, "").split(",")]
    written = read_key_file(file) if file is not None else ()
    return tuple(dict.fromkeys([*filter(None, named), *written]))


def read_key_file(path: Path) -> tuple[str, ...]:
    """The lines of a file but for empty ones and those that begin with #. A file without a key is a mistake."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MOST_FILE_BYTES + 1)
        lines = content.decode("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain ASCII text"
        raise ConfigError(f"The key file {path} cannot be read: {reason}.", "Write one key on each line.") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys or len(content) > _MOST_FILE_BYTES:
        raise ConfigError(f"The key file {path} holds no key, or is far too long.", "Write one key on each line.")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("other users can read the key file %s; chmod 600 mends that", path)
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
