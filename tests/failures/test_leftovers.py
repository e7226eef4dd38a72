"""Schedules that are closed leave nothing: no object, descriptor, mapping, thread or key in the store."""

from __future__ import annotations

import many_schedules
from rank_pool import RankPool


def test_many_schedules_leave_no_more_than_a_few(ranks: RankPool) -> None:
    assert ranks.run(2, many_schedules.growth, 60, timeout=120.0) == [{}, {}]
