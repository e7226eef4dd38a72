"""The walk: runs a program in thought, one rank after another, and finds the ranks that wait for each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from pypipe.program.errors import stuck
from pypipe.program.programs import Program


class Policy(ABC):
    """What ranks do in a walk, and what they wait for.

    Everything that a rank may wait for has a number, such as that of a message (`messages.Messages`), and one rank at
    most waits for each. A policy calls `wake` with a number when it comes to pass; since most come before anyone waits,
    it looks first:

        if number in self.waiting:
            self.wake(number)

    Attributes:
        waiting: for each number that a rank waits for, the rank.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}
        self._runnable: list[int] = []

    @abstractmethod
    def run(self, rank: int) -> Iterator[int]:
        """One rank's way through its list, as a generator.

        It yields the number of what the rank has to wait for, and is resumed once that has come to pass. It must not
        yield a number that has come to pass already.
        """

    @abstractmethod
    def reason(self, rank: int, number: int) -> tuple[int, str]:
        """Why a rank is stuck: the position that it cannot pass, and what it waits for, in words."""

    def relieve(self) -> None:
        """Let something happen when every rank waits or has finished: time passes, or a slot is granted.

        Where it wakes no rank, the walk is over. Without an override nothing happens.
        """
        return

    def wake(self, number: int) -> None:
        """Let the rank that waits for a number go on."""
        self._runnable.append(self.waiting.pop(number))

    def take_turns(self, n_ranks: int) -> None:
        """Let ranks run, each until it waits, as long as any can; those that are left wait for ever."""
        runnable, waiting = self._runnable, self.waiting
        ranks = [self.run(rank) for rank in range(n_ranks)]
        runnable.extend(range(n_ranks))
        while runnable:
            while runnable:
                rank = runnable.pop()
                number = next(ranks[rank], None)
                if number is not None:
                    waiting[number] = rank
            self.relieve()


def walk(program: Program, policy: Policy) -> None:
    """Run a program in thought until every rank has come to the end of its list.

    A rank that can go on does so until it waits; which rank goes first makes no difference to how far each of them
    gets, as long as what a rank waits for is not undone once it has come to pass.

    Args:
        program: what the ranks run.
        policy: what they do; used once.

    Raises:
        ProgramError: some ranks wait for each other; the message says what each of them waits for.
    """
    policy.take_turns(program.n_ranks)
    if policy.waiting:
        raise stuck(program, {rank: policy.reason(rank, number) for number, rank in policy.waiting.items()})
