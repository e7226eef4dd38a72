"""Deadlock check: a lowered program, run in thought with nothing buffered, has to reach its end."""

from __future__ import annotations

from pypipe.program.actions import Action, Kind
from pypipe.program.errors import stuck
from pypipe.program.messages import Messages
from pypipe.program.programs import Program


def check_progress(program: Program, messages: Messages) -> None:
    """Prove that every rank reaches the end of its list when each transfer is a rendezvous.

    A SEND blocks its rank until its RECV has been posted; F, B and I block until their message is there; a
    RECV and a W never block. In what order ranks take turns makes no difference to who gets how far, so one
    run is a proof.

    Args:
        program: lowered; each SEND has exactly one RECV.
        messages: its messages.

    Raises:
        ProgramError: some ranks wait for each other; the message says what each waits for.
    """
    bases = messages.bases
    posted, arrived = bytearray(messages.count), bytearray(messages.count)
    waiting_for_post: dict[int, int] = {}
    waiting_for_arrival: dict[int, int] = {}
    at = [0] * program.n_ranks
    runnable = list(range(program.n_ranks))
    while runnable:
        rank = runnable.pop()
        actions = program.ranks[rank]
        position = at[rank]
        while position < len(actions):
            stage, kind, microbatch = actions[position]
            base = bases[kind][stage]
            if base >= 0:
                message = base + microbatch
                if kind.is_receive:
                    posted[message] = 1
                    if message in waiting_for_post:
                        runnable.append(waiting_for_post.pop(message))
                elif kind.is_send:
                    if not posted[message]:
                        waiting_for_post[message] = rank
                        break
                    arrived[message] = 1
                    if message in waiting_for_arrival:
                        runnable.append(waiting_for_arrival.pop(message))
                elif not arrived[message]:
                    waiting_for_arrival[message] = rank
                    break
            position += 1
        at[rank] = position
    blocked = {rank: position for rank, position in enumerate(at) if position < len(program.ranks[rank])}
    if blocked:
        raise stuck(program, {rank: (position, _reason(program, at, rank)) for rank, position in blocked.items()})


def _reason(program: Program, at: list[int], rank: int) -> str:
    action = program.ranks[rank][at[rank]]
    stage, microbatch, placement = action.stage, action.microbatch, program.placement
    before, after = program.previous_stage(stage), program.next_stage(stage)
    is_send = action.kind.is_send
    towards_next = action.kind is Kind.SEND_F or action.kind in (Kind.B, Kind.I)
    other = after if towards_next else before
    assert other is not None  # only an action with a neighbour on another rank ever blocks
    if is_send:
        awaited = Action(other, Kind.RECV_F if action.kind is Kind.SEND_F else Kind.RECV_B, microbatch)
    else:
        awaited = Action(other, Kind.SEND_F if action.kind is Kind.F else Kind.SEND_B, microbatch)
    peer = placement[other]
    there = at[peer]
    stands = f"which is at position {there}, {program.ranks[peer][there]}"
    if is_send:
        return f"blocks in {action} until rank {peer}, {stands}, posts {awaited}"
    return f"blocks in {action} until rank {peer}, {stands}, runs {awaited}"
