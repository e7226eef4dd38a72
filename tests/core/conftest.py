"""Fixtures of the control layer's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hub_peers import Neighbours


@pytest.fixture(params=["unix", "tcp"])
def neighbours(request: pytest.FixtureRequest) -> Iterator[Neighbours]:
    """The same over a Unix socket and over TCP."""
    neighbours = Neighbours(request.param)
    yield neighbours
    neighbours.close()
