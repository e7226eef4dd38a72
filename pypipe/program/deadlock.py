"""Deadlock check: a lowered program, run in thought with nothing buffered, has to reach its end."""

from __future__ import annotations

from .actions import Action, Kind
from .errors import stuck
from .programs import Program


def check_progress(program: Program) -> None:
    """Prove that every rank reaches the end of its list when each transfer is a rendezvous.

    A SEND blocks its rank until its RECV has been posted; F, B and I block until their message is there; a
    RECV and a W never block. In what order ranks take turns makes no difference to who gets how far, so one
    run is a proof.

    Args:
        program: lowered; each SEND has exactly one RECV.

    Raises:
        ProgramError: some ranks wait for each other; the message says what each waits for.
    """
    awaited = _awaited_by_kind(program)
    n_microbatches = program.n_microbatches
    size = program.n_stages * n_microbatches
    # Messages are numbered by kind, receiving stage and microbatch.
    posted, arrived = bytearray(2 * size), bytearray(2 * size)
    waiting_for_post: dict[int, int] = {}
    waiting_for_arrival: dict[int, int] = {}
    at = [0] * program.n_ranks
    runnable = list(range(program.n_ranks))
    while runnable:
        rank = runnable.pop()
        actions = program.ranks[rank]
        position = at[rank]
        while position < len(actions):
            action = actions[position]
            kind = action.kind
            base = awaited[kind][action.stage]
            if base >= 0:
                message = base + action.microbatch
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


def _awaited_by_kind(program: Program) -> dict[Kind, list[int]]:
    """For each kind and stage, the number of the message of microbatch 0 that it handles; -1 for none."""
    n_stages, n_microbatches, placement = program.n_stages, program.n_microbatches, program.placement
    size = n_stages * n_microbatches
    none = -1
    inputs, gradients, outputs, input_gradients = ([none] * n_stages for _ in range(4))
    for stage in range(n_stages):
        before, after = program.previous_stage(stage), program.next_stage(stage)
        if before is not None and placement[before] != placement[stage]:
            inputs[stage] = stage * n_microbatches
            input_gradients[stage] = size + before * n_microbatches
        if after is not None and placement[after] != placement[stage]:
            gradients[stage] = size + stage * n_microbatches
            outputs[stage] = after * n_microbatches
    return {
        Kind.F: inputs,
        Kind.B: gradients,
        Kind.I: gradients,
        Kind.W: [none] * n_stages,
        Kind.RECV_F: inputs,
        Kind.RECV_B: gradients,
        Kind.SEND_F: outputs,
        Kind.SEND_B: input_gradients,
    }


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
