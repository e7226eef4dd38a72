"""Tensors of classes of their own are refused by name at every boundary, within a rank too."""

from __future__ import annotations

import odd_tensors_cases
import pytest
from rank_pool import RankPool

CASES = [
    ("ScheduleGPipe", 0),
    ("Schedule1F1B", 0),
    ("ScheduleZBH1", 0),
    ("ScheduleInterleaved1F1B v=2", 1),
    ("ScheduleZBVZeroBubble", 0),
    ("ScheduleZBVZeroBubble", 1),  # its last two stages are on one rank
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("link", ["shm", "c10d"])
@pytest.mark.parametrize("kind", odd_tensors_cases.KINDS)
@pytest.mark.parametrize(("schedule", "returns"), CASES)
def test_a_tensor_of_a_class_of_its_own_is_refused(
    ranks: RankPool, schedule: str, returns: int, kind: str, link: str
) -> None:
    for message in ranks.run(2, odd_tensors_cases.refused, schedule, link, kind, returns):
        assert f"output[1] is a {'torch.masked' if kind == 'MaskedTensor' else 'odd_tensors_cases'}" in message
        assert kind in message
