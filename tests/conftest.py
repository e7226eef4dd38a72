"""A pool of rank processes that lives as long as the test session: importing torch costs seconds per process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Rank processes import what they run by module name, so the helpers' folder is on the path of all of them.
sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from rank_pool import RankPool


@pytest.fixture(scope="session")
def _pools() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def ranks(_pools: RankPool) -> RankPool:
    """Runs a function on the first P of four rank processes: `ranks.run(P, function, *args) -> results by rank`."""
    return _pools
