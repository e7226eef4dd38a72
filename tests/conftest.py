"""A pool of rank processes that lives as long as the test session: importing torch costs seconds per process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
import search_path  # noqa: F401 - with it the other helpers are found

# A shell that runs the tests in the background has them ignore Ctrl-C, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example's time says nothing on a busy machine.
settings.register_profile("pypipe", deadline=None)
settings.load_profile("pypipe")

# Files that take long come first, so that no worker is left with one at the end. Minutes or so, longest first.
_LONG = ["nccl", "native", "campaign", "transparency", "demo", "signals", "autograd", "pipelines", "c10d"]
_LONG += ["splitting", "when_it_fails", "readme"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders files, not the tests of a file."""
    turns = {f"test_{name}.py": turn for turn, name in enumerate(_LONG)}
    items.sort(key=lambda item: turns.get(item.path.name, len(turns)))


import cuda_emulator  # noqa: E402
from rank_pool import RankPool  # noqa: E402


@pytest.fixture(scope="session")
def _pools() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def ranks(_pools: RankPool) -> RankPool:
    """Runs a function on the first P of four rank processes: `ranks.run(P, function, *args) -> results by rank`."""
    return _pools


@pytest.fixture(scope="session")
def gpus() -> Iterator[RankPool]:
    """As `ranks`, with the emulated driver and NCCL, over which all messages go (tests/emulator)."""
    if not cuda_emulator.has_compiler():
        pytest.skip("no C++ compiler (c++, g++, clang++ or $CXX): the emulator cannot be built here")
    emulator = cuda_emulator.build()
    pool = RankPool(
        4,
        {
            "PYPIPE_CUDA_LIBRARY": str(emulator.cuda),
            "PYPIPE_NCCL_LIBRARY": str(emulator.nccl),
            "PYPIPE_LINK": "nccl",
            "PYPIPE_EMULATOR_DELAY_US": "100",
        },
    )
    yield pool
    pool.close()
