"""A loss function may run its own backward: the gradient that it leaves on the output is the output's."""

from __future__ import annotations

import losses_cases
import pytest
import transparency
from rank_pool import RankPool

SCHEDULES = [
    *transparency.SINGLE,
    "ScheduleInterleaved1F1B v=2",
    "ScheduleInterleavedZeroBubble v=2",
    "ScheduleLoopedBFS v=2",
    *transparency.V_SHAPED,
    "ScheduleDualPipe",
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_gradient_that_a_loss_leaves_on_the_output_goes_on_into_the_stage(ranks: RankPool, schedule: str) -> None:
    for scale_grads in (True, False):
        found = [text for texts in ranks.run(2, losses_cases.compare, schedule, scale_grads) for text in texts]
        assert not found, "\n".join(found)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleZBH1"])
def test_an_output_may_be_a_tree(ranks: RankPool, schedule: str) -> None:
    found = [text for texts in ranks.run(2, losses_cases.of_a_tree, schedule) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleZBH1", "ScheduleZBVZeroBubble"])
def test_a_loss_that_is_refused_has_added_nothing(ranks: RankPool, schedule: str) -> None:
    found = [text for texts in ranks.run(2, losses_cases.refused, schedule) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleZBH1"])
def test_a_loss_that_changes_the_output_in_place(ranks: RankPool, schedule: str) -> None:
    assert ranks.run(2, losses_cases.in_place, schedule, False) == [[], []]
    for texts in ranks.run(2, losses_cases.in_place, schedule, True):
        assert "modified by an inplace operation" in texts[0]


@pytest.mark.parametrize("hands_over", [False, True], ids=["backs up", "hands over"])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "ScheduleDualPipe"])
def test_what_a_loss_adds_to_a_head_in_the_last_stage_is_weighted(
    ranks: RankPool, schedule: str, hands_over: bool
) -> None:
    found = [text for texts in ranks.run(2, losses_cases.with_a_head, schedule, hands_over) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_that_looks_at_gradients_of_the_output_adds_what_it_does_without_a_pipeline(
    ranks: RankPool, schedule: str
) -> None:
    found = [text for texts in ranks.run(2, losses_cases.like_unpipelined, schedule) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "ScheduleDualPipe"])
def test_a_loss_may_begin_its_own_backward_anywhere_in_the_first_step(ranks: RankPool, schedule: str) -> None:
    found = [text for texts in ranks.run(2, losses_cases.from_the_last_microbatch_on, schedule) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("what", ["half", "all", "assigned", "probe"])
@pytest.mark.parametrize(
    "schedule",
    ["ScheduleGPipe", "Schedule1F1B", "ScheduleZBH1", "ScheduleInterleaved1F1B v=2", "ScheduleZBVZeroBubble"],
)
def test_a_loss_that_begins_its_own_backward_later_is_an_error(ranks: RankPool, schedule: str, what: str) -> None:
    says = "returned a loss without a graph" if what == "assigned" else "has run a backward of its own"
    for texts in ranks.run(2, losses_cases.later, schedule, what):
        assert says in texts[0]
        assert "first step" in texts[0]


def test_a_loss_that_asks_for_gradients_of_parameters_is_told_that_it_cannot(ranks: RankPool) -> None:
    for texts in ranks.run(2, losses_cases.of_parameters, "Schedule1F1B"):
        assert "without the stage's graph" in texts[0]
