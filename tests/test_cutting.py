"""Whatever carries a batch is cut with it: a pipeline's numbers are those of the model that has the whole batch."""

from __future__ import annotations

import cutting_cases
import pytest
import transparency
from rank_pool import RankPool

SCHEDULES = [
    *transparency.SINGLE,
    *(f"{name} v=2" for name in transparency.LOOPED),
    *transparency.V_SHAPED,
    *transparency.BIDIRECTIONAL,
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_kind_of_value_is_cut_with_the_batch(ranks: RankPool, schedule: str) -> None:
    # Rows that M divides, and rows that it does not.
    cases = [(name, rows, count) for name in cutting_cases.CASES for rows, count in ((4, 2), (7, 3))]
    found = [text for texts in ranks.run(2, cutting_cases.compare, schedule, cases) for text in texts]
    assert not found, "\n".join(found)
