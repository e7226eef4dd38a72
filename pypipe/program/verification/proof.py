"""Verification: proof that a lowered program is complete, ordered, free of deadlock and bounded in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pypipe.program.actions import Kind
from pypipe.program.data_parallel import check_stage_actions
from pypipe.program.messages import Messages
from pypipe.program.programs import Channel, Program
from pypipe.program.verification.deadlock import check_progress
from pypipe.program.verification.positions import Positions, find_positions
from pypipe.program.verification.transfers import check_order, check_transfers


@dataclass(frozen=True, slots=True)
class Verified:
    """A lowered program that was found sound, and what the check learned about it.

    Args:
        program: the program, with its transfers.
        slots: for each channel, the receive buffers that it needs.
        peak_activations: for each rank, the most pairs of stage and microbatch whose F has begun and whose B
            (or W) has not ended.
    """

    program: Program
    slots: Mapping[Channel, int]
    peak_activations: tuple[int, ...]


def verify(lowered: Program, *, synchronous: bool = False) -> Verified:
    """Prove that a lowered program may run, trusting nothing but its lists.

    It checks that

    - the compute actions are complete and in order (as `lower` does);
    - each SEND has its RECV and each RECV its SEND, between neighbouring stages on different ranks and nowhere else,
      with the SEND after its producer and the RECV before its user;
    - both ends of each link list its messages in one order;
    - every rank reaches the end of its list when nothing is buffered, so that each SEND blocks its rank until its RECV
      is posted, and each F, B and I blocks until its message is there; where transfers are synchronous, when each RECV
      blocks its rank until its SEND is there, too (`deadlock.check_progress`);
    - UNSHARD, RESHARD and REDUCE_GRAD, which touch no message, follow `data_parallel.check_stage_actions`.

    It counts the slots that each channel needs: a RECV takes a slot where it stands, and the last action that needs its
    message gives the slot back.

    Args:
        lowered: a program with transfers, from `lower` or from elsewhere.
        synchronous: whether a transfer may block both of its ranks until it is over, as on GPUs. The program must have
            been lowered for it.

    Returns:
        The program with its slots and peaks. The time taken is linear in the number of actions.

    Raises:
        ProgramError: the program is faulty; the message names rank, position and action.
    """
    positions = find_positions(lowered)
    check_stage_actions(lowered)
    check_transfers(lowered, positions)
    messages = Messages(lowered)
    check_order(lowered, messages, positions)
    check_progress(lowered, messages, synchronous=synchronous)
    slots, peaks = _count(lowered, messages, positions)
    return Verified(lowered, MappingProxyType(slots), peaks)


def _count(program: Program, messages: Messages, positions: Positions) -> tuple[dict[Channel, int], tuple[int, ...]]:
    """Count each channel's slots (the most receives posted or messages needed at once) and each rank's peak."""
    n_stages = program.n_stages
    is_forward_only = positions.is_forward_only
    taken = [0] * (2 * n_stages)
    most = [0] * (2 * n_stages)
    peaks = []
    for actions in program.ranks:
        alive = peak = 0
        for stage, kind, _ in actions:
            if kind is Kind.RECV_F or kind is Kind.RECV_B:
                channel = stage if kind is Kind.RECV_F else n_stages + stage
                taken[channel] += 1
                if taken[channel] > most[channel]:
                    most[channel] = taken[channel]
            elif kind is Kind.F:
                alive += 1
                if alive > peak:
                    peak = alive
                if is_forward_only:
                    alive -= 1
                    taken[stage] -= 1
            elif kind is Kind.B or kind is Kind.W:
                alive -= 1
                taken[stage] -= 1
                taken[n_stages + stage] -= 1
        peaks.append(peak)
    counted = {messages.channel(i * program.n_microbatches): count for i, count in enumerate(most) if count}
    return dict(sorted(counted.items())), tuple(peaks)
