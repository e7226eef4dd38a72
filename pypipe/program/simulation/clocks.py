"""Timing: when each compute action of a program runs, as flat lists of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pypipe.program.actions import Action, Kind
from pypipe.program.programs import Program
from pypipe.program.simulation.costs import Costs
from pypipe.program.walk import Policy, walk


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


def run(
    program: Program,
    costs: Costs,
    busy_links: bool = False,
    durations: Sequence[Sequence[float]] | None = None,
) -> Times:
    """Run a program in simulated time: `simulate` without its checks.

    Args:
        program: known to be complete; transfers are skipped.
        costs: of its stages.
        busy_links: whether a link carries one message at a time.
        durations: for each rank, how long each of its actions but the transfers takes, instead of `costs.compute`.

    Raises:
        ProgramError: its ranks wait for each other for ever.
    """
    timing = _Timing(program.without_transfers() if program.has_transfers else program, costs, busy_links, durations)
    walk(timing.program, timing)
    return Times(timing.starts, timing.ends, tuple(timing.exposed))


class _Timing(Policy):
    """A run in simulated time; a rank's own clock goes on until it waits, so ranks' clocks differ.

    Args:
        program: without transfers.
        costs: of its stages.
        busy_links: whether a link carries one message at a time.
        durations: for each rank, those of its actions, or None for those of `costs`.
    """

    def __init__(
        self, program: Program, costs: Costs, busy_links: bool, durations: Sequence[Sequence[float]] | None
    ) -> None:
        super().__init__()
        self.program = program
        self.starts: list[list[float]] = [[] for _ in program.ranks]
        self.ends: list[list[float]] = [[] for _ in program.ranks]
        self.exposed = [0.0] * program.n_ranks
        self._compute, self._durations, self._rows = costs.compute, durations, _rows(program, costs)
        # For each result, when it was made, and when it is there where it is needed; -1 before.
        self._made = [-1.0] * (2 * program.n_stages * program.n_microbatches)
        self._there = self._made.copy()
        # When each link is free again.
        self._leaves = [0.0] * (2 * program.n_ranks**2) if busy_links else None

    def run(self, rank: int) -> Iterator[int]:
        """Note when each of the rank's actions runs."""
        rows, made, there, leaves, waiting = self._rows, self._made, self._there, self._leaves, self.waiting
        begun, done = self.starts[rank], self.ends[rank]
        actions = self.program.ranks[rank]
        if self._durations is None:
            compute = self._compute
            durations: Sequence[float] = [compute[kind][stage] for stage, kind, _ in actions]
        else:
            durations = self._durations[rank]
        clock = 0.0
        for (stage, kind, microbatch), duration in zip(actions, durations, strict=True):
            needed, result, latency, occupancy, link = rows[kind][stage]
            start = clock
            if needed >= 0:
                needed += microbatch
                arrival = there[needed]
                if arrival < 0:
                    yield needed
                    arrival = there[needed]
                if arrival > clock:
                    start = arrival
                    self.exposed[rank] += arrival - max(clock, made[needed])
            begun.append(start)
            clock = start + duration
            done.append(clock)
            if result >= 0:
                result += microbatch
                made[result] = clock
                if leaves is not None and link >= 0:
                    leaves[link] = max(clock, leaves[link]) + occupancy
                    there[result] = leaves[link] + latency
                else:
                    there[result] = clock + occupancy + latency
                if result in waiting:
                    self.wake(result)

    def reason(self, rank: int, number: int) -> tuple[int, str]:
        """Which result a rank waits for."""
        position = len(self.ends[rank])
        action = self.program.ranks[rank][position]
        channel, microbatch = divmod(number, self.program.n_microbatches)
        what = "output" if channel < self.program.n_stages else "gradient"
        source = channel % self.program.n_stages
        return position, f"waits in {action} for the {what} of stage {source}, microbatch {microbatch}"


# They need no other stage's result, and make none.
_ALONE = (Kind.W, Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)

_Row = tuple[int, int, float, float, int]


def _rows(program: Program, costs: Costs) -> dict[Kind, list[_Row]]:
    """What each kind of action needs and makes, for each stage.

    Numbers of microbatch 0's result that it needs and that it makes (-1 for none), and the latency, occupancy and
    number of the link (-1 for none) of the result that it makes.
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
        rows[Kind.F].append((needed, bases[stage], latency, occupancy, link))
        needed = -1 if after is None else n_outputs + bases[after]
        latency, occupancy, link = 0.0, 0.0, -1
        if before is not None and placement[before] != rank:
            latency, occupancy = costs.latency[before], costs.occupancy[before]
            link = n_ranks**2 + rank * n_ranks + placement[before]
        made = n_outputs + bases[stage]
        for kind in (Kind.B, Kind.I):
            rows[kind].append((needed, made, latency, occupancy, link))
        for kind in _ALONE:
            rows[kind].append((-1, -1, 0.0, 0.0, -1))
    return rows
