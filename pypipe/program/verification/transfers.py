"""Transfers: each SEND has its RECV, in the right places, and both ends of a link list them in one order."""

from __future__ import annotations

from pypipe.program.actions import Action, Kind
from pypipe.program.errors import fault
from pypipe.program.messages import Messages
from pypipe.program.programs import Link, Program
from pypipe.program.verification.positions import Positions

_TRANSFERS = {Kind.F: (Kind.SEND_F, Kind.RECV_F), Kind.B: (Kind.SEND_B, Kind.RECV_B)}


def check_transfers(program: Program, positions: Positions) -> None:
    """Check that messages cross between ranks where stages need them, and nowhere else.

    Each message between neighbouring stages on different ranks has one SEND, after its producer, and one RECV, before
    its user; no other SEND or RECV is listed.

    Raises:
        ProgramError: one of these does not hold.
    """
    for stage in range(program.n_stages):
        _check_leaving(program, positions, Kind.F, stage, program.next_stage(stage))
        _check_leaving(program, positions, Kind.B, stage, program.previous_stage(stage))
        _check_no_source(program, positions, Kind.F, stage, program.previous_stage(stage))
        _check_no_source(program, positions, Kind.B, stage, program.next_stage(stage))


def _crosses(program: Program, positions: Positions, kind: Kind, stage: int, neighbour: int | None) -> bool:
    """Tell whether messages of a kind go between ranks here; a forward-only program has no gradients."""
    if neighbour is None or (kind is Kind.B and positions.is_forward_only):
        return False
    return program.placement[neighbour] != program.placement[stage]


def _check_leaving(program: Program, positions: Positions, kind: Kind, source: int, target: int | None) -> None:
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
                what = "there is nothing to send: no stage on another rank takes it; leave this out"
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
            what = "there is nothing to receive: no stage on another rank sends it; leave this out"
            raise fault(program, what, program.ranks[rank][position], {rank: position})


def check_order(program: Program, messages: Messages, positions: Positions) -> None:
    """Compare the order in which the two ends of each link list its messages.

    Args:
        program: each SEND has its RECV.
        messages: its messages.
        positions: where its actions stand.

    Raises:
        ProgramError: the two ends disagree.
    """
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
                queue = queues[base] = (sent if kind.is_send else received).setdefault(link, [])
            queue.append(base + microbatch)
    for link, numbers in sent.items():
        if numbers != received[link]:
            what = f"the two ends of link {link}"
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
