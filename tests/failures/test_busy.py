"""schedule.busy(): long but living work is waited for; what is stuck is not."""

from __future__ import annotations

import busy_cases
from rank_pool import RankPool


def test_a_busy_rank_is_waited_for_and_a_stuck_one_is_not(ranks: RankPool) -> None:
    for rank, raised in enumerate(ranks.run(3, busy_cases.busy_then_stuck)):
        assert raised.startswith("PipelineTimeout"), f"rank {rank}: {raised}"
        assert "waits for rank 2" in raised, f"rank {rank}: {raised}"
        assert "between steps: has not called step() or eval() again" in raised, f"rank {rank}: {raised}"


def test_over_nccl_transfers_to_a_busy_rank_are_waited_for_too(gpus: RankPool) -> None:
    for rank, raised in enumerate(gpus.run(3, busy_cases.over_nccl)):
        assert raised.startswith("PipelineTimeout"), f"rank {rank}: {raised}"
        assert "between steps: has not called step() or eval() again" in raised, f"rank {rank}: {raised}"
