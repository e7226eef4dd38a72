"""Lifetimes: how long received messages need their slots, and from that the fewest slots that a channel needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pypipe.program.actions import Kind
from pypipe.program.messages import Messages
from pypipe.program.programs import Program
from pypipe.program.verification.positions import Positions


def fewest_slots(
    program: Program, messages: Messages, positions: Positions, links: Iterable[Sequence[int]]
) -> list[int]:
    """Count, for each channel, the most messages that are in use at one position of their rank's list.

    A message is in use from the start of the F (or B, or I) that takes it to the end of the last action that needs
    it: a backward needs the stage's input and the incoming gradient until its W where it is split. A link is
    a FIFO, so a message that is used later than one sent after it must be there as early as that one is used.
    For 1F1B this is min(M, P - rank) forward, and 1 backward.

    Args:
        program: with or without transfers.
        messages: its messages.
        positions: where its actions stand.
        links: for each link, its messages' numbers in the order in which it carries them.

    Returns:
        One number for each `number // M` of a message; 0 where there is no channel.
    """
    n_microbatches = program.n_microbatches
    uses = [*positions.tables[Kind.F], *positions.backward]
    releases = [*positions.release, *positions.release]
    used: list[list[int]] = [[] for _ in messages.received]
    released: list[list[int]] = [[] for _ in messages.received]
    for numbers in links:
        needed_by = -1
        for number in reversed(numbers):
            use = uses[number]
            if needed_by < 0 or use < needed_by:
                needed_by = use
            channel = number // n_microbatches
            used[channel].append(needed_by)
            released[channel].append(releases[number])
    return [_most_alive(*pair) for pair in zip(used, released, strict=True)]


def _most_alive(used: list[int], released: list[int]) -> int:
    """Count the most intervals, both ends included, that share a position; their ends come in any order."""
    used.sort()
    released.sort()
    most = gone = 0
    for born, position in enumerate(used, start=1):
        while released[gone] < position:
            gone += 1
        if born - gone > most:
            most = born - gone
    return most
