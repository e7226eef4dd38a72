"""Verification: proof that a lowered program is complete, ordered, free of deadlock and bounded in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .actions import Action, Kind
from .deadlock import check_progress
from .errors import fault
from .lifetimes import Message, RankSlots
from .positions import Positions, find_positions
from .programs import Channel, Link, Program, channel_of

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


def verify(lowered: Program) -> Verified:
    """Prove that a lowered program may run, trusting nothing but its lists.

    Checked are: the compute actions (as `lower` does); that each SEND has its RECV and each RECV its SEND,
    between neighbouring stages on different ranks and nowhere else; SEND after its producer, RECV before its
    user; both ends of each link in the same order; no RECV before a slot of its channel is free; and progress
    to the end when nothing is buffered, so that each SEND blocks its rank until its RECV is posted, and each
    F, B and I blocks until its message is there.

    Args:
        lowered: a program with transfers, from `lower` or from elsewhere.

    Returns:
        The program with its slots and peaks. Time is linear in the number of actions.

    Raises:
        ProgramError: the program is faulty; the message names rank, position and action.
    """
    positions = find_positions(lowered)
    for stage in range(lowered.n_stages):
        _check_transfers(lowered, positions, Kind.F, stage, lowered.next_stage(stage))
        _check_transfers(lowered, positions, Kind.B, stage, lowered.previous_stage(stage))
        _check_no_source(lowered, positions, Kind.F, stage, lowered.previous_stage(stage))
        _check_no_source(lowered, positions, Kind.B, stage, lowered.next_stage(stage))
    messages = _check_link_order(lowered, positions)
    slots = _check_slots(lowered, positions, messages)
    check_progress(lowered)
    return Verified(lowered, MappingProxyType(slots), _peak_activations(lowered, positions))


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


def _check_link_order(program: Program, positions: Positions) -> dict[Link, list[Message]]:
    """Compare the two ends of each link; return each link's messages in their order."""
    sent: dict[Link, list[Message]] = {}
    received: dict[Link, list[Message]] = {}
    routes: dict[tuple[Kind, int], tuple[Channel, list[Message]]] = {}
    channels: dict[Channel, Channel] = {}  # one object for each channel, so that comparing messages is quick
    for actions in program.ranks:
        for action in actions:
            kind = action.kind
            if kind.is_compute:
                continue
            route = routes.get((kind, action.stage))
            if route is None:
                channel = channel_of(action)
                channel = channels.setdefault(channel, channel)
                end = sent if kind.is_send else received
                route = routes[kind, action.stage] = channel, end.setdefault(program.link_of(channel), [])
            route[1].append((route[0], action.microbatch))
    for link, messages in sent.items():
        if messages != received[link]:
            _report_disorder(program, positions, link, messages, received[link])
    return received


def _report_disorder(
    program: Program, positions: Positions, link: Link, sent: list[Message], received: list[Message]
) -> None:
    pairs = zip(sent, received, strict=True)
    (sent_on, sent_microbatch), (received_on, received_microbatch) = next(p for p in pairs if p[0] != p[1])
    send_kind, receive_kind = _TRANSFERS[link.kind]
    send = Action(sent_on.source_stage, send_kind, sent_microbatch)
    receive = Action(received_on.target_stage, receive_kind, received_microbatch)
    marks = {
        rank: positions.tables[action.kind][action.stage * program.n_microbatches + action.microbatch]
        for rank, action in ((link.source_rank, send), (link.target_rank, receive))
    }
    what = f"the two ends of link {link} disagree on order: this is sent where {receive} is received"
    raise fault(program, what, send, marks)


def _check_slots(program: Program, positions: Positions, messages: Mapping[Link, list[Message]]) -> dict[Channel, int]:
    incoming: list[list[list[Message]]] = [[] for _ in program.ranks]
    for link, carried in messages.items():
        incoming[link.target_rank].append(carried)
    needed: dict[Channel, int] = {}
    for rank, actions in enumerate(program.ranks):
        slots = RankSlots(program, positions, incoming[rank])
        by_receive = {
            (_TRANSFERS[channel.kind][1], channel.target_stage): here for channel, here in slots.channels.items()
        }
        for position, action in enumerate(actions):
            if action.kind.is_receive:
                here = by_receive[action.kind, action.stage]
                here.taken += 1
                if here.taken > here.needed:
                    what = (
                        f"channel {channel_of(action)} needs {here.needed} slots, and all are taken: "
                        "list it after the action that releases one, or let lower() place it"
                    )
                    raise fault(program, what, action, {rank: position})
            slots.release(action)
        needed.update((channel, here.needed) for channel, here in slots.channels.items())
    return dict(sorted(needed.items()))


def _peak_activations(program: Program, positions: Positions) -> tuple[int, ...]:
    peaks = []
    for actions in program.ranks:
        alive = peak = 0
        for action in actions:
            kind = action.kind
            if kind is Kind.F:
                alive += 1
                peak = max(peak, alive)
                if positions.is_forward_only:
                    alive -= 1
            elif kind is Kind.B or kind is Kind.W:
                alive -= 1
        peaks.append(peak)
    return tuple(peaks)
