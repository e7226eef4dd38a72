"""Verification: proof that a lowered program is complete, ordered, free of deadlock and bounded in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from pypipe.program.actions import Action, Kind
from pypipe.program.errors import fault
from pypipe.program.messages import Messages
from pypipe.program.programs import Channel, Link, Program
from pypipe.program.single_communicator.progress import check_paired_progress
from pypipe.program.stage_actions import check_stage_actions
from pypipe.program.verification.deadlock import check_progress
from pypipe.program.verification.positions import Positions, find_positions

_TRANSFERS = {Kind.F: (Kind.SEND_F, Kind.RECV_F), Kind.B: (Kind.SEND_B, Kind.RECV_B)}


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


def verify(lowered: Program, *, single_communicator: bool = False) -> Verified:
    """Prove that a lowered program may run, trusting nothing but its lists.

    Checked are: the compute actions (as `lower` does); that each SEND has its RECV and each RECV its SEND,
    between neighbouring stages on different ranks and nowhere else; SEND after its producer, RECV before its
    user; both ends of each link in the same order; and progress to the end when nothing is buffered, so that each
    SEND blocks its rank until its RECV is posted, and each F, B and I blocks until its message is there.
    A RECV takes a slot where it stands, and the last action that needs its message gives it back: the
    slots that each channel needs are counted. Of UNSHARD, RESHARD and REDUCE_GRAD, which touch no message, it checks
    what `stage_actions.check_stage_actions` says.

    Where a pair of ranks has one communicator for both directions and both kinds of traffic (the NCCL link's
    fallback), transfers run by other rules, and the check of order and progress follows them: see
    `paired.check_paired_progress`. A program has to be lowered for it: `lower(program, single_communicator=True)`.

    Args:
        lowered: a program with transfers, from `lower` or from elsewhere.
        single_communicator: whether each pair of ranks has one communicator, instead of one for each link.

    Returns:
        The program with its slots and peaks. Time is linear in the number of actions.

    Raises:
        ProgramError: the program is faulty; the message names rank, position and action.
    """
    positions = find_positions(lowered)
    check_stage_actions(lowered)
    for stage in range(lowered.n_stages):
        _check_transfers(lowered, positions, Kind.F, stage, lowered.next_stage(stage))
        _check_transfers(lowered, positions, Kind.B, stage, lowered.previous_stage(stage))
        _check_no_source(lowered, positions, Kind.F, stage, lowered.previous_stage(stage))
        _check_no_source(lowered, positions, Kind.B, stage, lowered.next_stage(stage))
    messages = Messages(lowered)
    _check_order(lowered, messages, positions, by_pair=single_communicator)
    if single_communicator:
        check_paired_progress(lowered, messages)
    else:
        check_progress(lowered, messages)
    slots, peaks = _count(lowered, messages, positions)
    return Verified(lowered, MappingProxyType(slots), peaks)


def _crosses(program: Program, positions: Positions, kind: Kind, stage: int, neighbour: int | None) -> bool:
    """Whether messages of a kind go between ranks here; a forward-only program has no gradients."""
    if neighbour is None or (kind is Kind.B and positions.is_forward_only):
        return False
    return program.placement[neighbour] != program.placement[stage]


def _check_transfers(program: Program, positions: Positions, kind: Kind, source: int, target: int | None) -> None:
    """Check the transfers that leave a stage in one direction."""
    placement, n_microbatches = program.placement, program.n_microbatches
    send_kind, receive_kind = _TRANSFERS[kind]
    sends, receives = positions.tables[send_kind], positions.tables[receive_kind]
    compute = positions.tables[Kind.F] if kind is Kind.F else positions.backward
    crosses = _crosses(program, positions, kind, source, target)
    here = placement[source]
    for microbatch in program.microbatches_of(source):
        key = source * n_microbatches + microbatch
        send, producer = sends[key], compute[key]
        if target is None or not crosses:
            if send >= 0:
                what = "nothing is to be sent: no stage on another rank takes it"
                raise fault(program, what, program.ranks[here][send], {here: send})
            continue
        key = target * n_microbatches + microbatch
        receive, user, there = receives[key], compute[key], placement[target]
        if send < 0:
            missing = Action(source, send_kind, microbatch)
            what = f"rank {here} lists no {missing} for it; lower() inserts transfers"
            raise fault(program, what, program.ranks[here][producer], {here: producer, there: user})
        if receive < 0:
            what = f"rank {there} lists no {Action(target, receive_kind, microbatch)} for it"
            raise fault(program, what, program.ranks[here][send], {here: send, there: user})
        if send < producer:
            what = f"it sends what is made later, at position {producer}"
            raise fault(program, what, program.ranks[here][send], {here: send})
        if receive > user:
            what = f"its message is used earlier, at position {user}"
            raise fault(program, what, program.ranks[there][receive], {there: receive})


def _check_no_source(program: Program, positions: Positions, kind: Kind, stage: int, source: int | None) -> None:
    """Reject the receives that no stage on another rank sends to."""
    if _crosses(program, positions, kind, stage, source):
        return
    rank = program.placement[stage]
    receives = positions.tables[_TRANSFERS[kind][1]]
    for microbatch in program.microbatches_of(stage):
        position = receives[stage * program.n_microbatches + microbatch]
        if position >= 0:
            what = "nothing is to be received: no stage on another rank sends it"
            raise fault(program, what, program.ranks[rank][position], {rank: position})


def _check_order(program: Program, messages: Messages, positions: Positions, *, by_pair: bool) -> None:
    """Compare the two ends of each link; or of all that goes from one rank to another, both kinds together."""
    sent: dict[Link, list[int]] = {}
    received: dict[Link, list[int]] = {}
    for actions in program.ranks:
        queues: dict[int, list[int]] = {}
        for stage, kind, microbatch in actions:
            if not kind.is_transfer:
                continue
            base = messages.bases[kind][stage]
            queue = queues.get(base)
            if queue is None:
                link = program.link_of(messages.channel(base))
                key = replace(link, kind=Kind.F) if by_pair else link
                queue = queues[base] = (sent if kind.is_send else received).setdefault(key, [])
            queue.append(base + microbatch)
    for link, numbers in sent.items():
        if numbers != received[link]:
            what = f"the two ends of link {link}"
            if by_pair:
                what = f"ranks {link.source_rank} and {link.target_rank}, on their one communicator,"
            pairs = zip(numbers, received[link], strict=True)
            _report_disorder(program, messages, positions, what, *next(pair for pair in pairs if pair[0] != pair[1]))


def _report_disorder(
    program: Program, messages: Messages, positions: Positions, who: str, sent: int, received: int
) -> None:
    send, receive = messages.send(sent), messages.receive(received)
    marks = {
        program.placement[action.stage]: positions.tables[action.kind][
            action.stage * program.n_microbatches + action.microbatch
        ]
        for action in (send, receive)
    }
    raise fault(program, f"{who} disagree on order: this is sent where {receive} is received", send, marks)


def _count(program: Program, messages: Messages, positions: Positions) -> tuple[dict[Channel, int], tuple[int, ...]]:
    """Each channel's slots, the most receives posted or messages needed at once; and each rank's peak."""
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
