from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.serving import Server, serve


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The embedded model with its default drafter, one server for the tests of a file."""
    with serve() as running:
        yield running
