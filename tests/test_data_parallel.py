"""Stages wrapped for data parallelism: the gradients of one model on all batches, by one reduction a step."""

from __future__ import annotations

import pytest
import transparency
from data_parallel_cases import Case, train_many
from rank_pool import RankPool

SCHEDULES = [
    *transparency.SINGLE,
    "ScheduleInterleaved1F1B v=2",
    "ScheduleInterleavedZeroBubble v=2",
    "ScheduleLoopedBFS v=2",
    *transparency.V_SHAPED,
]
DDP = ["ddp", "bucket_view", "static", "static_unused", "find_unused", "hook", "replicate", "ddp_inside"]
FSDP = ["fsdp", "fsdp_nested", "fsdp_inside"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wrappers", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_replicated_stages_have_the_gradients_of_one_model(ranks: RankPool, wrappers: list[str], schedule: str) -> None:
    # Three microbatches of 2, 2 and 1 rows; and four of one row, so that gradients are what has been received.
    cases = [Case(schedule, wrapper, *((3, 5), (4, 4))[turn % 2]) for turn, wrapper in enumerate(wrappers)]
    found = [text for texts in ranks.run(4, train_many, cases) for text in texts]
    assert not found, "\n".join(found)


def test_hybrid_sharding(ranks: RankPool) -> None:
    cases = [Case("ScheduleZBH1", "hsdp", 3, 5, 1), Case("ScheduleInterleaved1F1B v=2", "hsdp", 3, 5, 1)]
    found = [text for texts in ranks.run(4, train_many, cases) for text in texts]
    assert not found, "\n".join(found)
