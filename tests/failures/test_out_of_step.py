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


@pytest.mark.parametrize(("dying", "how"), [(1, "killed"), (2, "ends"), (1, "killed without a schedule")])
def test_a_rank_that_ends_before_its_first_step_is_lost_at_once(ranks: RankPool, dying: int, how: str) -> None:
    for rank, said in enumerate(ranks.run_raw(3, out_of_step.one_dies_first, dying, how, timeout=60.0)):
        if rank != dying:
            # Long before the schedules' own timeout. Whoever hears of it from another rank says so.
            assert isinstance(said, str), said
            assert said.startswith("PeerLost"), said
            assert f"waited for rank {dying}" in said, said
            assert "has ended before it called step() or eval()" in said, said


@pytest.mark.parametrize("evaluating", [0, 1, 2])
@pytest.mark.parametrize("n_microbatches", [1, 4])
def test_eval_on_one_rank_and_step_on_the_others_is_a_mismatch(
    ranks: RankPool, evaluating: int, n_microbatches: int
) -> None:
    everyone = ranks.run(3, out_of_step.eval_and_step, evaluating, n_microbatches)
    for rank, (said, trained) in enumerate(everyone):
        assert not trained, f"rank {rank}: {trained}"
        assert len(said) == 1, f"rank {rank}: {said}"
        assert "one rank called step(), the other eval()" in said[0], said


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            LookupError,
            ["RemoteStageError", "rank 1 failed at a line of its own script", "LookupError: the data are gone"],
        ),
        (KeyboardInterrupt, ["RemoteStageError", "rank 1 was interrupted (KeyboardInterrupt)"]),
        (SystemExit, ["PeerLost", "rank 1 has left the pipeline", "came to the end of its script"]),
    ],
)
def test_what_takes_one_rank_out_of_its_block_is_told_to_the_others(
    ranks: RankPool, error: type[BaseException], words: list[str]
) -> None:
    for rank, (said, trained) in enumerate(ranks.run(3, out_of_step.one_leaves_its_block, 1, error)):
        assert not trained, f"rank {rank}: {trained}"
        if rank == 1:
            assert said == f"{error.__name__}: the data are gone"
        else:
            assert all(part in said for part in words), f"rank {rank}: {said}"


def test_a_step_in_a_second_thread_is_refused_and_the_first_goes_on(ranks: RankPool) -> None:
    for said in ranks.run(2, out_of_step.two_threads):
        assert len(said) == 1
        assert "in another thread" in said[0], said
