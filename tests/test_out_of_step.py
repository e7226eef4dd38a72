"""A rank that fails alone costs its peers one pipeline at most: those that are built later meet again."""

from __future__ import annotations

import re

import out_of_step
import pytest
from rank_pool import RankPool


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_starts_is_named_and_missed_once(ranks: RankPool, absent: int) -> None:
    for rank, (said, trained) in enumerate(ranks.run(3, out_of_step.one_never_starts, absent)):
        assert not trained, f"rank {rank}: {trained}"
        if rank == absent:
            assert not said
        else:
            assert said.startswith("PipelineTimeout"), said
            # A rank that is only slow may be named too.
            assert re.search(rf"waited for rank (\d, )*{absent}(, \d)* to start the same pipeline", said), said


def test_whoever_waits_longer_follows_those_that_gave_up(ranks: RankPool) -> None:
    for rank, (said, trained) in enumerate(ranks.run(3, out_of_step.deadlines_differ)):
        assert not trained, f"rank {rank}: {trained}"
        assert len(said) == (2 if rank == 0 else 0)
        assert all(text.startswith("PipelineTimeout") for text in said), said


def test_a_refusal_that_is_heard_late_is_heard_once(ranks: RankPool) -> None:
    for rank, (first, second, trained) in enumerate(ranks.run(3, out_of_step.one_cannot_build)):
        assert not trained, f"rank {rank}: {trained}"
        if rank == 0:
            assert "n_microbatches is 0" in first, first
            assert second.startswith("PipelineTimeout"), second
        else:
            assert "rank 0 could not build its part of the pipeline" in second, second
