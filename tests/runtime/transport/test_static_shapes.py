"""shapes="static": layouts are promised after the first step, on every link."""

from __future__ import annotations

import re

import nccl_cases
import pytest
import static_cases
import torch
from rank_pool import RankPool

import pypipe

SCHEDULES = ["ScheduleGPipe", "Schedule1F1B", "ScheduleZBH1", "ScheduleInterleaved1F1B v=2", "ScheduleZBVZeroBubble"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_stays_as_it_was_trains_as_ever(ranks: RankPool, name: str) -> None:
    assert ranks.run(2, static_cases.train, name) == [[], []]


@pytest.mark.parametrize("name", [*SCHEDULES, "ScheduleLoopedBFS v=2"])
@pytest.mark.parametrize("size", [2, 3])
def test_over_nccl_it_trains_under_every_seed(gpus: RankPool, size: int, name: str) -> None:
    for seed in range(3):
        found = [text for texts in gpus.run(size, nccl_cases.static_shapes, name, seed) for text in texts]
        assert not found, f"seed {seed}: " + "\n".join(found)


def test_over_nccl_receives_are_posted_before_anything_is_sent(gpus: RankPool) -> None:
    assert gpus.run(2, nccl_cases.posts_before_anything_is_sent) == [[], []]


@pytest.mark.parametrize("by", ["step", "eval"])
@pytest.mark.parametrize("pool", ["ranks", "gpus"])
def test_a_broken_promise_is_an_error_on_every_rank(request: pytest.FixtureRequest, pool: str, by: str) -> None:
    every = request.getfixturevalue(pool).run(3, static_cases.broken, by)
    then, now = ("2 of 8", "1 of 4") if by == "step" else ("1 of 4", "2 of 8")
    promise = rf'shapes="static".* it was {then} rows, .* and is {now} rows.*shapes="dynamic"'
    # Over NCCL the last rank takes the batch to be what was promised, and may be the first to find that it is not.
    target = "target .* has 4 rows, but the batch that the first stage got has 8" if pool == "gpus" else promise
    for raised in every:
        assert re.search(f"{promise}|{target}", raised, re.DOTALL), raised


def test_ranks_that_disagree_say_so(ranks: RankPool) -> None:
    for raised in ranks.run(2, static_cases.disagreeing):
        assert raised.startswith(
            "ConfigurationError: the ranks disagree about shapes (rank 0: static, rank 1: dynamic)"
        )


def test_there_are_two_kinds() -> None:
    stage = pypipe.PipelineStage(torch.nn.Linear(2, 2), 0, 1)
    with pytest.raises(pypipe.PipelineError, match=r"shapes='fixed': it takes .dynamic. or .static.$"):
        pypipe.Schedule1F1B(stage, 2, shapes="fixed")
