"""The walk: every rank comes to its end or is named with what it waits for, whichever rank takes its turn first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pypipe.program import Program, ProgramError, one_f_one_b
from pypipe.program.walk import Policy, walk

PROGRAM = one_f_one_b(3, 2)


class Scripted(Policy):
    """Each rank goes through a script: a number to wait for, or the negative of one that comes to pass."""

    def __init__(self, *scripts: list[int], relief: list[int] | None = None) -> None:
        super().__init__()
        self.scripts = scripts
        self.relief = relief or []
        self.passed: set[int] = set()
        self.ended: list[int] = []
        self.at = [0] * len(scripts)

    def run(self, rank: int) -> Iterator[int]:
        for position, number in enumerate(self.scripts[rank]):
            self.at[rank] = position
            if number < 0:
                self.come_to_pass(-number)
            elif number not in self.passed:
                yield number
        self.ended.append(rank)

    def relieve(self) -> None:
        if self.relief:
            self.come_to_pass(self.relief.pop(0))

    def reason(self, rank: int, number: int) -> tuple[int, str]:
        return self.at[rank], f"waits for number {number}"

    def come_to_pass(self, number: int) -> None:
        self.passed.add(number)
        if number in self.waiting:
            self.wake(number)


def walked(program: Program, policy: Scripted) -> Scripted:
    walk(program, policy)
    return policy


def test_every_rank_goes_on_when_what_it_waits_for_comes_to_pass() -> None:
    # To and fro between the first two, and the third waits for the second.
    policy = walked(PROGRAM, Scripted([-1, 2, -3], [1, -2, 3, -4], [4]))
    assert sorted(policy.ended) == [0, 1, 2]
    assert not policy.waiting


def test_what_came_to_pass_before_a_rank_waits_holds_no_rank_up() -> None:
    policy = walked(PROGRAM, Scripted([1, 2], [-1, -2], []))
    assert sorted(policy.ended) == [0, 1, 2]


def test_ranks_that_wait_for_each_other_are_named_with_position_and_reason() -> None:
    policy = Scripted([-1, 2], [1, 3, -2], [4, -3])
    with pytest.raises(ProgramError, match="deadlock") as caught:
        walk(PROGRAM, policy)
    text = str(caught.value)
    for rank, at, number in ((0, 1, 2), (1, 1, 3), (2, 0, 4)):
        assert f"rank {rank} at position {at} waits for number {number}" in text
    assert (caught.value.rank, caught.value.position, caught.value.action) == (0, 1, PROGRAM.ranks[0][1])


def test_a_rank_at_its_end_is_not_among_those_that_wait() -> None:
    with pytest.raises(ProgramError) as caught:
        walk(PROGRAM, Scripted([], [1], []))
    assert "rank 1 at position 0 waits for number 1" in str(caught.value)
    assert "rank 0" not in str(caught.value)


def test_relief_comes_as_often_as_every_rank_waits_and_once_more() -> None:
    policy = walked(PROGRAM, Scripted([1, 2], [-3, 4], [3, -4], relief=[1, 2, 9, 9]))
    assert sorted(policy.ended) == [0, 1, 2]
    assert policy.relief == [9]  # asked once more when all had ended: nothing wakes a rank then, and the walk is over
