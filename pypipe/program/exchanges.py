"""Lowering for synchronous transfers: all ranks list what they exchange in one order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pypipe.program.actions import Action, Kind
from pypipe.program.messages import Messages
from pypipe.program.programs import Program
from pypipe.program.walk import Policy, walk

_UNITS = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}


def order_exchanges(program: Program, messages: Messages) -> list[list[Action]]:
    """Put transfers into the ranks' lists, each into both ranks' lists at the same moment of a run.

    The run is simulated with T_F = T_I = T_W: a SEND follows its producer, and the RECV stands at that time after the
    last action that its rank has started. So there is one order of all that happens in the pipeline, of which each
    rank's list is a part: a rank that waits in a transfer, or for everything that it has listed so far, waits for what
    comes earlier in that order. Transfers that a rank is to issue between two of its actions stand together, opposite
    ones paired.

    Args:
        program: compute actions only, complete and in order within each rank.
        messages: its messages.

    Raises:
        ProgramError: some ranks wait for each other.
    """
    exchanges = _Exchanges(program, messages)
    walk(program, exchanges)
    return exchanges.lists


class _Exchanges(Policy):
    """A run in which time passes; the lists are written as it goes."""

    def __init__(self, program: Program, messages: Messages) -> None:
        super().__init__()
        self.lists: list[list[Action]] = [[] for _ in program.ranks]
        self._program, self._messages = program, messages
        self._at = [0] * program.n_ranks
        # A rank waits for message n under the number n; rank r waits for the end of its own action under
        # messages.count + r.
        self._arrived = bytearray(messages.count)
        self._now = 0
        self._running: list[tuple[int, int]] = []  # a heap: the time at which a rank's action ends, and the rank

    def run(self, rank: int) -> Iterator[int]:
        """Start the rank's actions one by one, each as soon as its message is there."""
        bases, arrived, lowered, end = (
            self._messages.bases,
            self._arrived,
            self.lists[rank],
            self._messages.count + rank,
        )
        for position, action in enumerate(self._program.ranks[rank]):
            self._at[rank] = position
            stage, kind, microbatch = action
            base = bases[kind][stage]
            if base >= 0 and not arrived[base + microbatch]:
                yield base + microbatch
            lowered.append(action)
            heapq.heappush(self._running, (self._now + _UNITS[kind], rank))
            yield end

    def relieve(self) -> None:
        """Let time pass to the next end of an action.

        All that ends at one time sends before anything starts then: what can be one group becomes one.
        """
        running, placement = self._running, self._program.placement
        self._now = running[0][0] if running else self._now
        while running and running[0][0] == self._now:
            _, rank = heapq.heappop(running)
            self.wake(self._messages.count + rank)
            stage, kind, microbatch = self._program.ranks[rank][self._at[rank]]
            base = self._messages.sent[kind][stage]
            if base < 0:
                continue
            number = base + microbatch
            self.lists[rank].append(self._messages.send(number))
            receive = self._messages.receive(number)
            self.lists[placement[receive.stage]].append(receive)
            self._arrived[number] = 1
            if number in self.waiting:
                self.wake(number)

    def reason(self, rank: int, number: int) -> tuple[int, str]:
        """Say which message a rank waits for."""
        return self._at[rank], self._messages.reason(number, self._at)
