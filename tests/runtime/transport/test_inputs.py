"""A stage may keep its inputs: they are its own then, or the next microbatch's memory, which is refused by name."""

from __future__ import annotations

import pytest
from inputs_cases import kept, lent
from rank_pool import RankPool

KINDS = ["detached", "view", "itself", "numpy"]


@pytest.mark.parametrize("link", ["auto", "c10d"])
@pytest.mark.parametrize(
    "schedule", ["Schedule1F1B", "ScheduleZBH1", "ScheduleInterleaved1F1B v=2", "ScheduleInterleavedZeroBubble v=2"]
)
def test_a_stage_that_keeps_its_inputs_from_the_first_step_on_may(ranks: RankPool, schedule: str, link: str) -> None:
    for kind in KINDS:
        assert ranks.run(2, kept, schedule, kind, link, 0) == [[], []], kind


def test_over_torch_distributed_it_may_begin_at_any_step(ranks: RankPool) -> None:
    for kind in KINDS:
        assert ranks.run(2, kept, "Schedule1F1B", kind, "c10d", 1) == [[], []], kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_that_begins_later_is_refused_by_name(ranks: RankPool, kind: str) -> None:
    for (text,) in ranks.run(2, kept, "Schedule1F1B", kind, "auto", 1):
        assert "has begun to keep its input beyond its backward" in text
        assert "rank 1" in text or text.startswith("a stage")


@pytest.mark.parametrize("model", ["mlp", "gpt", "mixed"])
@pytest.mark.parametrize(
    "schedule",
    [
        "ScheduleGPipe",
        "Schedule1F1B",
        "ScheduleZBH1",
        "ScheduleInterleaved1F1B v=2",
        "ScheduleInterleavedZeroBubble v=2",
        "ScheduleZBVZeroBubble",
        "ScheduleDualPipeV",
    ],
)
def test_other_stages_work_on_the_slots_themselves(ranks: RankPool, schedule: str, model: str) -> None:
    for copies in ranks.run(2, lent, schedule, model):
        assert not any(copies)
