"""One tiny target of each architecture for the whole session."""

from __future__ import annotations

import pytest

from tests.engine.engines import ARCHITECTURES, tiny_target
from understudy.assembly import Target


@pytest.fixture(scope="session", params=ARCHITECTURES)
def target(request: pytest.FixtureRequest) -> Target:
    """Each architecture in turn."""
    return tiny_target(request.param)


@pytest.fixture(scope="session")
def llama() -> Target:
    """The tiny Llama."""
    return tiny_target("llama")
