"""Timing: when each compute action of a program runs, as flat lists of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pypipe.program.actions import Action, Kind
from pypipe.program.errors import stuck
from pypipe.program.programs import Program
from pypipe.program.simulation.costs import Costs


@dataclass(frozen=True, slots=True)
class Times:
    """When each action but the transfers runs.

    Args:
        starts: for each rank, the start of each of these actions, in order.
        ends: their ends.
        exposed: for each rank, the time that it waited for results which were made and on their way.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    exposed: tuple[float, ...]


def timed_lists(program: Program) -> list[Sequence[Action]]:
    """Each rank's actions but the transfers, in order."""
    return list(program.without_transfers().ranks) if program.has_transfers else list(program.ranks)


def run(program: Program, costs: Costs, busy_links: bool = False) -> Times:
    """Run a program in simulated time: `simulate` without its checks.

    Args:
        program: known to be complete; transfers are skipped.
        costs: of its stages.
        busy_links: whether a link carries one message at a time.

    Raises:
        ProgramError: its ranks wait for each other for ever.
    """
    lists = timed_lists(program)
    rows = _rows(program, costs)
    # For each result, when it was made, and when it is there where it is needed; -1 before.
    made = [-1.0] * (2 * program.n_stages * program.n_microbatches)
    there = made.copy()
    leaves = [0.0] * (2 * program.n_ranks**2 if busy_links else 0)  # when each link is free again
    waiting: dict[int, int] = {}
    starts: list[list[float]] = [[] for _ in lists]
    ends: list[list[float]] = [[] for _ in lists]
    exposed = [0.0] * len(lists)
    runnable = list(range(len(lists)))
    while runnable:
        rank = runnable.pop()
        actions, begun, done = lists[rank], starts[rank], ends[rank]
        clock = done[-1] if done else 0.0
        for position in range(len(done), len(actions)):
            action = actions[position]
            duration, needed, result, latency, occupancy, link = rows[action.kind][action.stage]
            start = clock
            if needed >= 0:
                needed += action.microbatch
                arrival = there[needed]
                if arrival > clock:
                    start = arrival
                    exposed[rank] += arrival - max(clock, made[needed])
                elif arrival < 0:
                    waiting[needed] = rank
                    break
            begun.append(start)
            clock = start + duration
            done.append(clock)
            if result >= 0:
                result += action.microbatch
                made[result] = clock
                if busy_links and link >= 0:
                    leaves[link] = max(clock, leaves[link]) + occupancy
                    there[result] = leaves[link] + latency
                else:
                    there[result] = clock + occupancy + latency
                if result in waiting:
                    runnable.append(waiting.pop(result))
    _require_finished(program, lists, [len(done) for done in ends])
    return Times(starts, ends, tuple(exposed))


# They need no other stage's result, and make none.
_ALONE = (Kind.W, Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)

_Row = tuple[float, int, int, float, float, int]


def _rows(program: Program, costs: Costs) -> dict[Kind, list[_Row]]:
    """One row for each kind and stage.

    A row holds the duration, the numbers of microbatch 0's result that it needs and that it makes (-1 for none), and
    the latency, occupancy and number of the link (-1 for none) of the result that it makes.
    """
    n_stages, n_ranks, placement = program.n_stages, program.n_ranks, program.placement
    bases = range(0, n_stages * program.n_microbatches, program.n_microbatches)
    n_outputs = n_stages * program.n_microbatches
    rows: dict[Kind, list[_Row]] = {kind: [] for kind in costs.compute}
    for stage in range(n_stages):
        rank, before, after = placement[stage], program.previous_stage(stage), program.next_stage(stage)
        needed = -1 if before is None else bases[before]
        latency, occupancy, link = costs.latency[stage], costs.occupancy[stage], -1
        if after is not None and placement[after] != rank:
            link = rank * n_ranks + placement[after]
        rows[Kind.F].append((costs.compute[Kind.F][stage], needed, bases[stage], latency, occupancy, link))
        needed = -1 if after is None else n_outputs + bases[after]
        latency, occupancy, link = 0.0, 0.0, -1
        if before is not None and placement[before] != rank:
            latency, occupancy = costs.latency[before], costs.occupancy[before]
            link = n_ranks**2 + rank * n_ranks + placement[before]
        made = n_outputs + bases[stage]
        for kind in (Kind.B, Kind.I):
            rows[kind].append((costs.compute[kind][stage], needed, made, latency, occupancy, link))
        for kind in _ALONE:
            rows[kind].append((costs.compute[kind][stage], -1, -1, 0.0, 0.0, -1))
    return rows


def _require_finished(program: Program, lists: Sequence[Sequence[Action]], reached: Sequence[int]) -> None:
    waits = {}
    for rank, (actions, position) in enumerate(zip(lists, reached, strict=True)):
        if position == len(actions):
            continue
        action = actions[position]
        source = program.previous_stage(action.stage) if action.kind is Kind.F else program.next_stage(action.stage)
        what = "output" if action.kind is Kind.F else "gradient"
        waits[rank] = (
            position,
            f"waits in {action} for the {what} of stage {source}, microbatch {action.microbatch}",
        )
    if waits:
        raise stuck(program.without_transfers(), waits)
