"""A failure on one rank is an error on all: in the same call, or in words in the next one; and what it left in `.grad`.

The NCCL link runs on the emulated driver and NCCL.
"""

from __future__ import annotations

from pathlib import Path

import failure_order
import pytest
from rank_pool import RankPool

LINKS = ["shm", "c10d", "nccl"]
EVERY = [
    *("ScheduleGPipe", "Schedule1F1B", "ScheduleZBH1", "ScheduleZBH2"),
    *("ScheduleInterleaved1F1B v=2", "ScheduleInterleavedZeroBubble v=2", "ScheduleLoopedBFS v=2"),
    *("ScheduleZBVZeroBubble", "ScheduleVHalf", "ScheduleDualPipeV"),
]


def _pool(request: pytest.FixtureRequest, link: str) -> RankPool:
    pool: RankPool = request.getfixturevalue("gpus" if link == "nccl" else "ranks")
    return pool


@pytest.mark.parametrize("call", ["step", "eval"])
@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("link", LINKS)
def test_a_rank_begins_no_action_once_it_can_know_of_a_failure(
    request: pytest.FixtureRequest, link: str, schedule: str, call: str
) -> None:
    results = _pool(request, link).run(3, failure_order.stops, link, schedule, call)
    for rank, (text, more) in enumerate(results):
        assert more == 0, f"rank {rank} began {more} more forwards"
        assert text.startswith("ArithmeticError" if rank == 1 else f"RemoteStageError: rank {rank}, at {rank}"), text
        assert rank == 1 or "stopped because rank 1 failed at 1F0 (stage 1, forward, microbatch 0)" in text


@pytest.mark.parametrize(("schedule", "call"), [(EVERY[0], "eval"), (EVERY[1], "eval"), (EVERY[1], "step")])
@pytest.mark.parametrize("link", LINKS)
def test_a_rank_that_has_done_its_last_action_looks_once_more(
    request: pytest.FixtureRequest, link: str, schedule: str, call: str
) -> None:
    culprit, late = (0, 2) if call == "step" else (2, 0)
    results = _pool(request, link).run(3, failure_order.at_the_end, link, schedule, call)
    assert results[culprit].startswith("ArithmeticError"), results
    start = f"RemoteStageError: rank {late}, at the end of the step: stopped because rank {culprit} failed at {culprit}"
    assert results[late].startswith(start), results[late]


@pytest.mark.parametrize("fault", ["call", "script"])
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleZBH1"])
@pytest.mark.parametrize("link", LINKS)
def test_a_step_of_which_all_is_well_ends_although_another_rank_has_failed_since(
    request: pytest.FixtureRequest, link: str, schedule: str, fault: str, tmp_path: Path
) -> None:
    results = _pool(request, link).run(3, failure_order.ahead, link, schedule, fault, str(tmp_path / "flag"))
    first, second = results[0]
    assert first == "", first
    where = "the start of the step" if fault == "call" else "a line of its own script, outside step() and eval()"
    start = f"RemoteStageError: rank 0, stage 0, between steps: stopped because rank 2 failed at {where}: "
    assert second.startswith(start), second


@pytest.mark.parametrize(
    ("schedule", "call", "then"),
    [
        ("ScheduleGPipe", "eval", "eval"),
        ("ScheduleGPipe", "eval", "step"),
        ("Schedule1F1B", "eval", "close"),
        ("ScheduleGPipe", "eval", "with"),
        ("ScheduleGPipe", "forward only", "step"),
        ("Schedule1F1B", "forward only", "close"),
        ("Schedule1F1B", "step", "step"),
        ("ScheduleZBH1", "step", "close"),
        ("ScheduleGPipe", "step", "eval"),
    ],
)
@pytest.mark.parametrize("link", LINKS)
def test_a_rank_that_has_returned_is_told_by_its_next_call(
    request: pytest.FixtureRequest, link: str, schedule: str, call: str, then: str, tmp_path: Path
) -> None:
    results = _pool(request, link).run(3, failure_order.returned, link, schedule, call, then, str(tmp_path))
    culprit = 0 if call == "step" else 2
    assert results[culprit][0].startswith("ArithmeticError"), results[culprit]
    name = "eval()" if call == "eval" else "step()"
    when = "between steps" if then in ("step", "eval") else "at close()"
    for rank in {0, 1, 2} - {culprit}:
        first, second, third = results[rank]
        assert first == ""
        assert second.startswith(
            f"RemoteStageError: rank {rank}, stage {rank}, {when}: the last {name} failed on rank {culprit} after this "
            f"rank had returned from it: rank {culprit} failed at {culprit}"
        ), second
        assert ("this rank's part of that step was whole" in second) == (call == "step"), second
        assert "this schedule is closed" in third, third


@pytest.mark.parametrize("kind", failure_order.KINDS)
@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("link", ["shm", "c10d"])
def test_the_note_counts_what_is_in_grad(ranks: RankPool, link: str, schedule: str, kind: str) -> None:
    places = [0.05, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    found = ranks.run(2, failure_order.gradients, link, schedule, kind, places)
    assert not any(found), "\n".join(text for texts in found for text in texts)


@pytest.mark.parametrize(
    ("schedule", "second", "adds"),
    [
        ("Schedule1F1B", "splits", True),
        ("ScheduleGPipe", "whole", True),
        ("ScheduleZBH1", "splits", False),  # I adds nothing to weights
        ("ScheduleZBH1", "early", True),  # but those that a Function does with its input's
    ],
)
@pytest.mark.parametrize("link", ["shm", "c10d"])
def test_nothing_is_said_to_be_added_where_nothing_was(
    ranks: RankPool, link: str, schedule: str, second: str, adds: bool
) -> None:
    (text, _), (own, added) = ranks.run(2, failure_order.broken_off, link, schedule, second)
    assert added == adds
    assert text.startswith("RemoteStageError"), text
    note = "on rank 1 .grad holds part of this step: 0 of 4 backwards, and perhaps part of the one that failed"
    assert (note in own) == adds, own
    assert (".grad holds part" in own) == adds, own
    assert "on rank 0" not in text, text
