"""A model that split() cuts trains as the whole model does, whatever its shape, its schedule and its cuts."""

from __future__ import annotations

import pytest
import splitting_cases
import splitting_models
from rank_pool import RankPool


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", splitting_models.MODELS)
def test_a_model_trains_as_it_does_whole(ranks: RankPool, model: str, size: int) -> None:
    schedule = "Schedule1F1B" if size == 2 else "ScheduleZBH1"
    for found in ranks.run(size, splitting_cases.train, model, schedule, size):
        assert found == []


@pytest.mark.parametrize("model", splitting_models.MODELS)
def test_a_rank_holds_several_stages(ranks: RankPool, model: str) -> None:
    for found in ranks.run(2, splitting_cases.train, model, "ScheduleZBVZeroBubble", 4):
        assert found == []


@pytest.mark.parametrize("model", ["chain", "biased", "net", "shared"])
@pytest.mark.parametrize("schedule", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_stages_in_a_loop(ranks: RankPool, model: str, schedule: str) -> None:
    for found in ranks.run(2, splitting_cases.train, model, schedule, 4):
        assert found == []


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "ScheduleZBH2", "ScheduleDualPipe"])
def test_every_schedule_of_one_stage_a_rank(ranks: RankPool, schedule: str) -> None:
    for found in ranks.run(4, splitting_cases.train, "chain", schedule, 4, 5, 9):
        assert found == []


@pytest.mark.parametrize("schedule", ["ScheduleLoopedBFS", "ScheduleVHalf", "ScheduleVMin", "ScheduleDualPipeV"])
def test_every_schedule_of_two_stages_a_rank(ranks: RankPool, schedule: str) -> None:
    for found in ranks.run(4, splitting_cases.train, "chain", schedule, 8, 5, 9):
        assert found == []


def test_copies_of_a_tied_model(ranks: RankPool) -> None:
    for found in ranks.run(4, splitting_cases.train, "tied", "ScheduleDualPipe", 4):
        assert found == []


HOWS = [(model, how) for model in ("chain", "biased", "net") for how in ("first", "meta")]
HOWS += [("chain", "names"), ("biased", "list")]


@pytest.mark.parametrize(("model", "how"), HOWS)
def test_a_model_from_the_meta_device_and_inputs_of_the_first_rank_alone(ranks: RankPool, model: str, how: str) -> None:
    for found in ranks.run(2, splitting_cases.train, model, "Schedule1F1B", 2, 3, 7, how):
        assert found == []


@pytest.mark.parametrize("wrapper", ["ddp", "fully_shard"])
def test_replicas_of_a_pipeline(ranks: RankPool, wrapper: str) -> None:
    for schedule in ("Schedule1F1B", "ScheduleZBVZeroBubble"):
        for found in ranks.run(4, splitting_cases.train_replicas, schedule, wrapper):
            assert found == []
