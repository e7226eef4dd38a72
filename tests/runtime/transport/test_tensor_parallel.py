"""Tensor-parallel stages: the gradients of the whole model, also where DTensors cross a boundary."""

from __future__ import annotations

import loss_parallel_cases
import pytest
import transparency
from rank_pool import RankPool
from tensor_parallel_cases import Case, copied, train_many, without_a_mesh

STYLES = ["plain", "residual", "to_local", "shard", "replicate", "partial"]


@pytest.mark.parametrize(
    "schedule",
    [
        *transparency.SINGLE,
        "ScheduleInterleaved1F1B v=2",
        "ScheduleInterleavedZeroBubble v=2",
        "ScheduleLoopedBFS v=2",
        *transparency.V_SHAPED,
    ],
)
def test_tensor_parallel_stages_have_the_gradients_of_the_whole_model(ranks: RankPool, schedule: str) -> None:
    found = [text for texts in ranks.run(4, train_many, [Case(schedule, s) for s in STYLES]) for text in texts]
    assert not found, "\n".join(found)


def test_tensor_parallel_stages_that_are_sharded_as_well(ranks: RankPool) -> None:
    schedules = ["ScheduleZBH1", "ScheduleInterleaved1F1B v=2", "ScheduleZBVZeroBubble"]
    found = [text for texts in ranks.run(4, train_many, [Case(s, "fsdp", 1) for s in schedules]) for text in texts]
    assert not found, "\n".join(found)


def test_a_mesh_that_no_parameter_tells_is_asked_for(ranks: RankPool) -> None:
    refused = ranks.run(4, without_a_mesh, False)
    assert all("pass get_mesh= to PipelineStage" in text for text in refused), refused
    assert all("with the dimensions tp, of shape (2,)" in text for text in refused)
    # The whole row has two halves, one from each rank of the mesh; each rank's weight gets its half's gradient.
    halves = [[2.0 * (8 * half + i) for i in range(8)] for half in range(2)]
    assert ranks.run(4, without_a_mesh, True) == [*halves, [], []]


def test_gradients_are_copied_without_a_collective(ranks: RankPool) -> None:
    assert ranks.run(4, copied) == [[]] * 4


@pytest.mark.parametrize(
    "schedule",
    ["ScheduleGPipe", "Schedule1F1B", "ScheduleZBH1", "ScheduleInterleaved1F1B v=2", "ScheduleZBVZeroBubble"],
)
def test_a_loss_of_sharded_classes(ranks: RankPool, schedule: str) -> None:
    found = [text for texts in ranks.run(4, loss_parallel_cases.train, schedule) for text in texts]
    assert not found, "\n".join(found)
