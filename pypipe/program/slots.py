"""Slots: how many receive buffers each channel gets, from what was proven of the programs that run."""

from __future__ import annotations

from collections.abc import Sequence

from pypipe.program.actions import Kind
from pypipe.program.programs import Channel, Program
from pypipe.program.verification.proof import Verified

_COPY_SLOTS = 2  # one message is added up while the next one arrives


def count_slots(programs: Sequence[Verified]) -> dict[Channel, int]:
    """For each channel, how many slots serve every one of some programs.

    The proof counts the messages that are in use at once. With one more slot, the next message arrives meanwhile;
    without it, that transfer would wait for a backward, and another rank for that transfer. A channel of outputs gets
    no more slots than microbatches pass it: under 1F1B the one from rank i - 1 to rank i gets min(M, P - i + 1). A
    channel of gradients gets the additional slot even where one message passes it, because a trainer that keeps a
    gradient keeps its slot.

    Args:
        programs: alternatives for the same stages, such as the training program and its forward-only form.

    Returns:
        The numbers, including those of the channels between two copies of the model (`copy_channels`).
    """
    slots: dict[Channel, int] = {}
    for verified in programs:
        for channel, needed in verified.slots.items():
            n_microbatches = len(verified.program.microbatches_of(channel.target_stage))
            most = n_microbatches if channel.kind is Kind.F else needed + 1
            slots[channel] = max(min(needed + 1, most), slots.get(channel, 0))
    for verified in programs:
        slots.update(dict.fromkeys(copy_channels(verified.program), _COPY_SLOTS))
    return slots


def copy_channels(program: Program) -> list[Channel]:
    """The channels of kind W, over which two copies of the model on different ranks exchange gradients after a step.

    Args:
        program: with one chain of stages, which has no such channels, or with two.
    """
    if len(program.chains) == 1:
        return []
    pairs = zip(program.chains[0].stages, program.chains[1].stages, strict=True)
    apart = [(a, b) for a, b in pairs if program.placement[a] != program.placement[b]]
    return [Channel(Kind.W, *pair) for a, b in apart for pair in ((a, b), (b, a))]
