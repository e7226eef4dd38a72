"""Hooks of accumulated gradients run once a step, with the whole gradient, as in one backward of the whole batch."""

from __future__ import annotations

import deferred_hooks_cases
import pytest
import transparency
from rank_pool import RankPool


@pytest.mark.parametrize("updates", [False, True], ids=["notes", "an optimizer in the backward"])
@pytest.mark.parametrize(
    "schedule",
    [*transparency.SINGLE, "ScheduleInterleaved1F1B v=2", "ScheduleInterleavedZeroBubble v=2", "ScheduleZBVZeroBubble"],
)
def test_a_hook_sees_the_batch_s_gradient_once(ranks: RankPool, schedule: str, updates: bool) -> None:
    found = [text for texts in ranks.run(2, deferred_hooks_cases.compare, schedule, updates) for text in texts]
    assert not found, "\n".join(found)


def test_a_step_that_fails_gives_hooks_back_and_runs_none(ranks: RankPool) -> None:
    # A 0 for the step, in which none had run by then; and one each for the backward after it.
    assert ranks.run(2, deferred_hooks_cases.after_a_failure) == [[0, 1, 1], [0, 1, 1]]
