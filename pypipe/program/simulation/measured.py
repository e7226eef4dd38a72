"""Measured steps: what each rank's own clock says, put together to one timeline, and what it is measured against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pypipe.program.actions import Action, Kind
from pypipe.program.programs import Program
from pypipe.program.simulation.timeline import Event, Timeline, simulate


@dataclass(frozen=True, slots=True)
class RankTimes:
    """When one rank did its actions other than transfers, by its own clock.

    Args:
        host: ranks with the same one share a clock.
        events: in order; times in any unit, from any zero.
    """

    host: str
    events: Sequence[Event]


def merge_ranks(program: Program, ranks: Sequence[RankTimes]) -> Timeline:
    """One step of all ranks on one clock, on which the first action of all starts at 0.

    Ranks of one host share its clock. The clocks of two hosts are compared by the messages between them, as NTP
    does it (RFC 5905, section 8): each message's delay, from the end of the action that made it to the start of
    the one that uses it, is the true delay and what one clock is ahead of the other. The shortest delays of either
    direction are taken to be alike. Where messages go one way only, the shortest is taken to be 0.

    Args:
        program: what they ran, with or without transfers.
        ranks: by rank.

    Raises:
        ValueError: a rank did not do what the program says.
    """
    for rank, (actions, measured) in enumerate(zip(program.without_transfers().ranks, ranks, strict=True)):
        if tuple(event.action for event in measured.events) != actions:
            raise ValueError(f"rank {rank} has not done what the program {program.name} says")
    ahead = _clocks(program, ranks)
    shifted = [
        [Event(action, start - ahead[each.host], end - ahead[each.host]) for action, start, end in each.events]
        for each in ranks
    ]
    first = min((events[0].start for events in shifted if events), default=0.0)
    return Timeline(
        program.without_transfers(),
        tuple(tuple(Event(action, start - first, end - first) for action, start, end in each) for each in shifted),
    )


def predict(measured: Timeline) -> Timeline:
    """The step that the simulator foretells where each stage's actions of a kind take their measured mean time.

    Transfers take none: what they add to the measured step is what the two differ in, with the unevenness of
    microbatches.

    Args:
        measured: a timeline of a whole program.
    """
    n_stages = measured.program.n_stages
    means: dict[Kind, list[float]] = {}
    for kind in (kind for kind in Kind if not kind.is_transfer):
        times: list[list[float]] = [[] for _ in range(n_stages)]
        for events in measured.ranks:
            for action, start, end in events:
                if action.kind is kind:
                    times[action.stage].append(end - start)
        means[kind] = [math.fsum(each) / len(each) if each else 0.0 for each in times]
    return simulate(
        measured.program,
        forward=means[Kind.F],
        backward=means[Kind.B],
        input_backward=means[Kind.I],
        weight_backward=means[Kind.W],
        unshard=means[Kind.UNSHARD],
        reshard=means[Kind.RESHARD],
        reduce_grad=means[Kind.REDUCE_GRAD],
    )


def _clocks(program: Program, ranks: Sequence[RankTimes]) -> dict[str, float]:
    """For each host, what its clock is ahead of that of rank 0's host."""
    delays = _shortest_delays(program, ranks)
    ahead = {ranks[0].host: 0.0}
    reached = [ranks[0].host]
    while reached:
        host = reached.pop(0)
        for other in dict.fromkeys(each.host for each in ranks):
            there, back = delays.get((host, other)), delays.get((other, host))
            if other in ahead or (there is None and back is None):
                continue
            if there is not None and back is not None:
                difference = (there - back) / 2
            else:
                difference = there if there is not None else -back  # type: ignore[operator]  # one of them is there
            ahead[other] = ahead[host] + difference
            reached.append(other)
    return {each.host: ahead.get(each.host, 0.0) for each in ranks}


def _shortest_delays(program: Program, ranks: Sequence[RankTimes]) -> dict[tuple[str, str], float]:
    """From host to host, the shortest time between a message's making and its use, each by its own host's clock."""
    ends: dict[tuple[bool, int, int], float] = {}
    for each in ranks:
        for action, _, end in each.events:
            if _exchanges(action):
                ends[_result(action)] = end
    before = [program.previous_stage(stage) for stage in range(program.n_stages)]
    after = [program.next_stage(stage) for stage in range(program.n_stages)]
    shortest: dict[tuple[str, str], float] = {}
    for each in ranks:
        for action, start, _ in each.events:
            source = before[action.stage] if action.kind is Kind.F else after[action.stage]
            if source is None or not _exchanges(action):
                continue
            host = ranks[program.placement[source]].host
            made = ends.get((action.kind is Kind.F, source, action.microbatch))
            if host != each.host and made is not None:
                pair = (host, each.host)
                shortest[pair] = min(shortest.get(pair, math.inf), start - made)
    return shortest


def _exchanges(action: Action) -> bool:
    """Whether it may use a message, and make one."""
    return action.kind.is_compute and action.kind is not Kind.W


def _result(action: Action) -> tuple[bool, int, int]:
    return action.kind is Kind.F, action.stage, action.microbatch
