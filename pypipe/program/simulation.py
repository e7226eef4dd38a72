"""Simulation: when each action of a program would run, given what each takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .actions import Action, Kind
from .errors import stuck
from .positions import find_positions
from .programs import Program

Cost = float | Sequence[float]


class Event(NamedTuple):
    """One action's place in time; `start` and `end` are in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each compute action of a program runs; time 0 is the start of the step.

    Args:
        program: the program that was simulated.
        ranks: for each rank, its events in order.
    """

    program: Program
    ranks: tuple[tuple[Event, ...], ...]

    @property
    def step_time(self) -> float:
        """The time from 0 to the end of the last action of all."""
        return max((events[-1].end for events in self.ranks if events), default=0.0)

    @property
    def span(self) -> float:
        """The longest time that one rank takes from its first start to its last end.

        It leaves out the time that the pipeline takes to reach a rank, as overlapping steps would. It is the
        "cost" of the zero-bubble paper (arXiv 2401.10241, table 5), whose bubble rate is 1 - work / span.
        """
        return max((events[-1].end - events[0].start for events in self.ranks if events), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """For each rank, the part of the step time in which it computes nothing: its bubble."""
        step_time = self.step_time
        return tuple(step_time - sum(event.end - event.start for event in events) for events in self.ranks)

    @property
    def bubble_ratio(self) -> float:
        """All ranks' idle time over ranks x step time; 0 for a step that takes no time."""
        whole = len(self.ranks) * self.step_time
        return sum(self.idle) / whole if whole else 0.0


def simulate(
    program: Program,
    *,
    forward: Cost = 1.0,
    backward: Cost = 2.0,
    input_backward: Cost | None = None,
    weight_backward: Cost | None = None,
    hop: float = 0.0,
) -> Timeline:
    """Run a program in simulated time.

    Each rank runs its list in order, each action as soon as the rank is free and what it needs has come. A
    result reaches a stage on another rank one hop after it was made, while the ranks go on computing; slots
    and blocking sends are not simulated, and transfers in the lists are skipped.

    Args:
        program: with or without transfers.
        forward: time of an F, in any unit: one number, or one for each stage.
        backward: time of a B.
        input_backward: time of an I; by default B less W, or half of B.
        weight_backward: time of a W; by default B less I, or half of B.
        hop: latency of a transfer between ranks, in the same unit.

    Raises:
        ProgramError: the program is incomplete, or its ranks wait for each other for ever.
        ValueError: a negative time, or a sequence with another length than the number of stages.
    """
    find_positions(program)
    if hop < 0:
        raise ValueError(f"hop is {hop}: a latency cannot be negative")
    costs = _costs_by_kind(program, forward, backward, input_backward, weight_backward)
    compute = program.compute_only()
    n_microbatches, placement = program.n_microbatches, program.placement
    size = program.n_stages * n_microbatches
    # Results are numbered by kind (outputs, then gradients), producing stage and microbatch.
    needs, makes = _results_by_kind(program)
    hops = {Kind.F: [0.0] * program.n_stages, Kind.B: [0.0] * program.n_stages}
    for stage in range(program.n_stages):
        for kind, source in ((Kind.F, program.previous_stage(stage)), (Kind.B, program.next_stage(stage))):
            if source is not None and placement[source] != placement[stage]:
                hops[kind][stage] = hop
    hops[Kind.I], hops[Kind.W] = hops[Kind.B], hops[Kind.B]
    ready: list[float | None] = [None] * (2 * size)
    waiting: dict[int, int] = {}
    events: list[list[Event]] = [[] for _ in compute.ranks]
    clocks = [0.0] * compute.n_ranks
    runnable = list(range(compute.n_ranks))
    while runnable:
        rank = runnable.pop()
        actions, done, clock = compute.ranks[rank], events[rank], clocks[rank]
        for position in range(len(done), len(actions)):
            action = actions[position]
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            start = clock
            base = needs[kind][stage]
            if base >= 0:
                available = ready[base + microbatch]
                if available is None:
                    waiting[base + microbatch] = rank
                    break
                start = max(start, available + hops[kind][stage])
            clock = start + costs[kind][stage]
            done.append(Event(action, start, clock))
            base = makes[kind][stage]
            if base >= 0:
                ready[base + microbatch] = clock
                if base + microbatch in waiting:
                    runnable.append(waiting.pop(base + microbatch))
        clocks[rank] = clock
    _require_finished(compute, events)
    return Timeline(program, tuple(map(tuple, events)))


def _costs_by_kind(
    program: Program, forward: Cost, backward: Cost, input_backward: Cost | None, weight_backward: Cost | None
) -> dict[Kind, list[float]]:
    full = _by_stage(program, "backward", backward)
    if input_backward is None and weight_backward is None:
        half = [cost / 2 for cost in full]
        input_half, weight_half = half, half
    else:
        given_input = None if input_backward is None else _by_stage(program, "input_backward", input_backward)
        given_weight = None if weight_backward is None else _by_stage(program, "weight_backward", weight_backward)
        input_half = given_input or _rest(program, "backward less weight_backward", full, given_weight)
        weight_half = given_weight or _rest(program, "backward less input_backward", full, given_input)
    return {
        Kind.F: _by_stage(program, "forward", forward),
        Kind.B: full,
        Kind.I: input_half,
        Kind.W: weight_half,
    }


def _by_stage(program: Program, name: str, cost: Cost) -> list[float]:
    costs = list(cost) if isinstance(cost, Sequence) else [cost] * program.n_stages
    if len(costs) != program.n_stages:
        raise ValueError(
            f"{name} has {len(costs)} times for {program.n_stages} stages: give one number, or one a stage"
        )
    for stage, value in enumerate(costs):
        if value < 0:
            raise ValueError(f"{name} of stage {stage} is {value}: a time cannot be negative")
    return costs


def _rest(program: Program, name: str, full: list[float], part: list[float] | None) -> list[float]:
    assert part is not None  # the caller has one half of the backward or the other
    return _by_stage(program, name, [whole - given for whole, given in zip(full, part, strict=True)])


def _results_by_kind(program: Program) -> tuple[dict[Kind, list[int]], dict[Kind, list[int]]]:
    """For each kind and stage, the numbers of microbatch 0's result that it needs, and makes; -1: none."""
    n_stages, n_microbatches = program.n_stages, program.n_microbatches
    size = n_stages * n_microbatches
    outputs = [stage * n_microbatches for stage in range(n_stages)]
    gradients = [size + stage * n_microbatches for stage in range(n_stages)]
    none = [-1] * n_stages
    before = [program.previous_stage(stage) for stage in range(n_stages)]
    after = [program.next_stage(stage) for stage in range(n_stages)]
    inputs = [-1 if source is None else outputs[source] for source in before]
    arriving = [-1 if source is None else gradients[source] for source in after]
    needs = {Kind.F: inputs, Kind.B: arriving, Kind.I: arriving, Kind.W: none}
    makes = {Kind.F: outputs, Kind.B: gradients, Kind.I: gradients, Kind.W: none}
    return needs, makes


def _require_finished(program: Program, events: list[list[Event]]) -> None:
    waits = {}
    for rank, actions in enumerate(program.ranks):
        position = len(events[rank])
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
        raise stuck(program, waits)
