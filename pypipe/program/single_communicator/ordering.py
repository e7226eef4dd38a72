"""Lowering where each pair of ranks has one communicator: both ranks get their transfers in one order."""

from __future__ import annotations

import heapq

from pypipe.program.actions import Action, Kind
from pypipe.program.errors import stuck
from pypipe.program.messages import Messages
from pypipe.program.programs import Program

_UNITS = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}


def pair_transfers(program: Program, messages: Messages) -> list[list[Action]]:
    """The ranks' lists with transfers, each put into both ranks' lists at the same moment of a run.

    The run is simulated with T_F = T_I = T_W: a SEND follows its producer, and the RECV stands at that time after the
    last action that its rank has started. So the two ranks of a pair list what they exchange in one order, and
    transfers that a rank is to issue between two of its actions stand together, opposite ones paired.

    Args:
        program: compute actions only, complete and in order within each rank.
        messages: its messages.

    Raises:
        ProgramError: some ranks wait for each other.
    """
    lists: list[list[Action]] = [[] for _ in program.ranks]
    at = [0] * program.n_ranks
    arrived = bytearray(messages.count)
    waiting: dict[int, int] = {}
    running: list[tuple[int, int]] = []  # the time at which a rank's action ends, and the rank
    now, ready = 0, list(range(program.n_ranks))
    while ready or running:
        # All that ends at one time sends before anything starts then: what can be one group becomes one.
        for rank in ready:
            if at[rank] == len(program.ranks[rank]):
                continue
            stage, kind, microbatch = action = program.ranks[rank][at[rank]]
            base = messages.bases[kind][stage]
            if base >= 0 and not arrived[base + microbatch]:
                waiting[base + microbatch] = rank
                continue
            lists[rank].append(action)
            heapq.heappush(running, (now + _UNITS[kind], rank))
        ready = []
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:
            _, rank = heapq.heappop(running)
            ready.append(rank)
            stage, kind, microbatch = program.ranks[rank][at[rank]]
            at[rank] += 1
            base = messages.sent[kind][stage]
            if base < 0:
                continue
            number = base + microbatch
            lists[rank].append(messages.send(number))
            receive = messages.receive(number)
            lists[program.placement[receive.stage]].append(receive)
            arrived[number] = 1
            if number in waiting:
                ready.append(waiting.pop(number))
    if waiting:
        raise stuck(program, {rank: (at[rank], messages.reason(number, at)) for number, rank in waiting.items()})
    return lists
