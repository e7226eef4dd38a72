"""Faults of every kind, at any action of any rank, for every schedule and link: who raises what, and what comes after.

`python tests/failures/faults.py` runs more of them. PYPIPE_FAULTS sets how many cases each link gets here,
PYPIPE_FAULTS_FIRST the first seed.
"""

from __future__ import annotations

import os

import campaign_runner
import cuda_emulator
import pytest
from rank_pool import RankPool

DEFAULTS = {"shm": 200, "c10d": 70, "nccl": 30}
CASES = {link: int(os.environ.get("PYPIPE_FAULTS", count)) for link, count in DEFAULTS.items()}
FIRST = int(os.environ.get("PYPIPE_FAULTS_FIRST", "0"))


@pytest.mark.timeout(300 + 2 * max(CASES.values()))
@pytest.mark.parametrize("link", CASES)
def test_every_rank_learns_the_first_cause_and_a_new_schedule_trains(ranks: RankPool, link: str) -> None:
    if link == "nccl" and not cuda_emulator.has_compiler():
        pytest.skip("no C++ compiler: the emulator cannot be built here")
    with campaign_runner.runner(link, ranks) as runner:
        found = runner.run(FIRST, CASES[link])
    assert not found, f"{len(found)} of {CASES[link]}\n" + "\n\n".join(found[:20])
