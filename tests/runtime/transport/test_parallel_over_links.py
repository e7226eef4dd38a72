"""Over other links, too, gradients of replicated, tensor-parallel and tied stages are those of one model."""

from __future__ import annotations

from typing import Any

import over_links
import pytest
from data_parallel_cases import Case
from rank_pool import RankPool
from tensor_parallel_cases import Case as TensorCase

SCHEDULES = ["Schedule1F1B", "ScheduleZBH1", "ScheduleZBVZeroBubble"]


@pytest.fixture
def over(request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = request.getfixturevalue("gpus" if request.node.callspec.params["link"] == "nccl" else "ranks")
    return pool


def _check(over: RankPool, link: str, kind: str, cases: list[Any]) -> None:
    found = [text for texts in over.run(4, over_links.train_many, link, kind, cases, timeout=200.0) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("link", ["c10d", "nccl"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicated_stages(over: RankPool, link: str, schedule: str) -> None:
    _check(over, link, "data", [Case(schedule, wrapper, 4, 4) for wrapper in ("ddp", "fsdp", "fsdp_nested")])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("link", ["c10d", "nccl"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensor_parallel_stages(over: RankPool, link: str, schedule: str) -> None:
    _check(over, link, "tensor", [TensorCase(schedule, style) for style in ("plain", "residual", "to_local", "shard")])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("link", ["c10d", "nccl"])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "ScheduleDualPipe"])
def test_tied_parameters(over: RankPool, link: str, schedule: str) -> None:
    _check(over, link, "ties", [(schedule, 2), (schedule, 3)])
