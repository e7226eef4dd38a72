"""Faults of every kind, at any action of any rank, for every schedule and link: who raises what, and what comes after.

PYPIPE_FAULTS sets how many cases each link gets: the default is what fits into CI, where c10d takes six times as long.
"""

from __future__ import annotations

import os
from collections import defaultdict

import campaign
import pytest
from rank_pool import RankPool

CASES = {link: int(os.environ.get("PYPIPE_FAULTS", default)) for link, default in {"shm": 240, "c10d": 70}.items()}
FIRST = int(os.environ.get("PYPIPE_FAULTS_FIRST", "0"))
_AT_ONCE = 40


@pytest.mark.timeout(120 + 2 * max(CASES.values()))
@pytest.mark.parametrize("link", CASES)
def test_every_rank_learns_the_first_cause_and_a_new_schedule_trains(ranks: RankPool, link: str) -> None:
    by_size = defaultdict(list)
    for seed in range(FIRST, FIRST + CASES[link]):
        case = campaign.draw(seed, link)
        by_size[case.n_ranks].append(case)
    found = []
    for size, cases in by_size.items():
        for start in range(0, len(cases), _AT_ONCE):
            some = cases[start : start + _AT_ONCE]
            results = ranks.run(size, campaign.run_cases, some, timeout=60.0 + len(some))
            for case, *seen in zip(some, *results, strict=True):
                found += campaign.judge(case, seen)
    assert not found, f"{len(found)} of {CASES[link]}\n" + "\n\n".join(found[:20])
