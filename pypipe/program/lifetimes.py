"""Lifetimes: how long received messages need their slots, and from that how many slots a channel needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .actions import Action, Kind
from .positions import Positions
from .programs import Channel, Program

Message = tuple[Channel, int]
"""A channel and the microbatch whose output or gradient it carries."""


@dataclass(slots=True, eq=False)
class ChannelSlots:
    """The slots of one channel while its target rank's list is walked.

    Args:
        needed: the most of its messages that are alive at one position of the list; for 1F1B min(M, P - rank)
            forward, and 1 backward.
        taken: the slots that posted or arrived messages have at this point of the walk.
    """

    needed: int
    taken: int = 0


class RankSlots:
    """The slots of one rank: of every channel that leads to it, none of them taken at first.

    A message lives from the start of the F (or B, or I) that uses it to the end of the last action that needs
    it: a backward needs the stage's input and the incoming gradient until its W where it is split. A link is
    a FIFO, so a message that is used later than one sent after it must be there as early as that one is used.

    Args:
        program: with or without transfers.
        positions: where its actions stand.
        links: for each link to the rank, its messages in the order in which it carries them.
    """

    def __init__(self, program: Program, positions: Positions, links: Iterable[Sequence[Message]]) -> None:
        self.channels: dict[Channel, ChannelSlots] = {}
        self._by_stage: dict[int, list[ChannelSlots]] = {}
        self._releasing = (Kind.F,) if positions.is_forward_only else (Kind.B, Kind.W)
        for messages in links:
            for channel, (used, released) in _lifetimes_by_channel(program, positions, messages).items():
                slots = self.channels[channel] = ChannelSlots(_most_alive(used, released))
                self._by_stage.setdefault(channel.target_stage, []).append(slots)

    def release(self, action: Action) -> Sequence[ChannelSlots]:
        """Give back the slots whose messages nothing needs once this action has ended, and return them."""
        if action.kind not in self._releasing:
            return ()
        released = self._by_stage.get(action.stage, ())
        for slots in released:
            slots.taken -= 1
        return released


def _lifetimes_by_channel(
    program: Program, positions: Positions, messages: Sequence[Message]
) -> dict[Channel, tuple[list[int], list[int]]]:
    """For each channel of a link, the positions where its messages must be there, and where they go."""
    forward, backward, release = positions.tables[Kind.F], positions.backward, positions.release
    n_microbatches = program.n_microbatches
    lifetimes: dict[Channel, tuple[list[int], list[int]]] = {}
    needed_by: int | None = None
    for channel, microbatch in reversed(messages):
        used, released = lifetimes.get(channel) or lifetimes.setdefault(channel, ([], []))
        key = channel.target_stage * n_microbatches + microbatch
        use = (forward if channel.kind is Kind.F else backward)[key]
        needed_by = use if needed_by is None else min(needed_by, use)
        used.append(needed_by)
        released.append(release[key])
    return lifetimes


def _most_alive(used: list[int], released: list[int]) -> int:
    """The most intervals, both ends included, that share a position; their ends in any order."""
    used.sort()
    released.sort()
    most = gone = 0
    for born, position in enumerate(used, start=1):
        while released[gone] < position:
            gone += 1
        most = max(most, born - gone)
    return most
