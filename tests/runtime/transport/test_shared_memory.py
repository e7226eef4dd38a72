"""Tensors of one message that share memory at the sender arrive apart: to change one is an error, or harmless."""

from __future__ import annotations

import pytest
import shared_memory_cases
import torch
from rank_pool import RankPool

from pypipe.runtime.tensor_memory import overlapping

SCHEDULES = [
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleZBH1",
    "ScheduleInterleaved1F1B v=2",
    "ScheduleZBVZeroBubble",
]


@pytest.mark.parametrize("evaluates", [False, True], ids=["step", "eval"])
@pytest.mark.parametrize("link", ["shm", "c10d"])
@pytest.mark.parametrize("kind", ["view", "detached", "overlapping"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_to_change_one_of_those_that_overlap_is_an_error(
    ranks: RankPool, schedule: str, kind: str, link: str, evaluates: bool
) -> None:
    everyone = ranks.run(2, shared_memory_cases.run, schedule, link, kind, evaluates)
    if evaluates:  # a first rank may be gone by then
        everyone = [texts for texts in everyone if texts]
        assert everyone
    for texts in everyone:
        assert len(texts) == 1, texts
        assert "tensor 1 of the input was changed in place" in texts[0], texts
        assert "clone()" in texts[0], texts


@pytest.mark.parametrize("evaluates", [False, True], ids=["step", "eval"])
@pytest.mark.parametrize("link", ["shm", "c10d"])
@pytest.mark.parametrize("kind", ["halves", "twice"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_to_change_parts_that_do_not_overlap_or_the_same_tensor_is_right(
    ranks: RankPool, schedule: str, kind: str, link: str, evaluates: bool
) -> None:
    assert ranks.run(2, shared_memory_cases.run, schedule, link, kind, evaluates) == [[], []]


def test_tensors_overlap_where_they_have_an_element_in_common() -> None:
    whole = torch.zeros(4, 6)
    rows, columns = whole.split(2), whole.split(3, 1)
    assert overlapping([*rows, *columns]) == (0, 1, 2, 3)
    assert overlapping(rows) == overlapping(columns) == ()
    assert overlapping([whole[::2], whole[1::2], torch.zeros(2)]) == ()
    assert overlapping([torch.zeros(2), whole[::2], whole.t()[2:3]]) == (1, 2)
    assert overlapping([whole[:1].expand(5, 6), whole[1:]]) == ()
    assert overlapping([whole[:1].expand(5, 6), whole[0, 5]]) == (0, 1)
    assert overlapping([whole[:0], whole]) == ()
    assert overlapping([whole.view(torch.int16)[:, 1:2], whole[:, 0], whole[:, 1]]) == (0, 1)
    assert overlapping([whole.unfold(0, 2, 1), whole[3:]]) == (0, 1)
    assert overlapping([torch.zeros(2), torch.zeros(2)]) == overlapping([whole]) == ()
