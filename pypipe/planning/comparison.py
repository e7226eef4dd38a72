"""The comparison: every schedule, built, verified and simulated for one request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pypipe.planning.request import PlanError, Request
from pypipe.program import Program, ProgramError, Timeline, prepare, simulate
from pypipe.program.builders.registry import build_all
from pypipe.program.search.candidates import Candidate, Stages, candidates, choose
from pypipe.program.simulation.costs import costs_of
from pypipe.program.simulation.shares import by_stage

_FIRST_LOOK = 150_000  # actions that the search lists for each placement at first
_SECOND_LOOK = 1_000_000  # and for each of the most promising
_BIG = 40_000  # a placement with more actions gets no first look: its fixed schedules say how promising it is


@dataclass(frozen=True)
class Row:
    """One schedule's figures.

    Args:
        name: its name.
        step_time: from the start of the step to the end of the last action.
        bubble_ratio: the ranks' idle share of ranks x step time.
        bubble_ratio_by_span: 1 - work / the longest time from a rank's first start to its last end.
        peak_activations: for each rank, the most that it keeps alive, in activations of one microbatch on one rank.
        peak_memory: the same in the unit of the request's memory.
        transfers: messages from rank to rank in a step.
        verified: whether the verifier accepts it.
        stages_per_rank: stages of one copy of the model on each rank.
        copies: of the model's parameters: 2 for a bidirectional schedule.
        exposed_transfer: for each rank, the time that it waits for messages on their way.
        fits: whether the peaks are within the memory of the request.
        problem: why it is not verified, in one line; empty where it is.
        is_best: the shortest step that fits and is verified, with one copy of the parameters unless two are allowed.
    """

    name: str
    step_time: float
    bubble_ratio: float
    bubble_ratio_by_span: float
    peak_activations: tuple[float, ...]
    peak_memory: tuple[float, ...]
    transfers: int
    verified: bool
    stages_per_rank: int
    copies: int
    exposed_transfer: tuple[float, ...]
    fits: bool
    problem: str = ""
    is_best: bool = False


@dataclass(frozen=True)
class Comparison:
    """All schedules for one request.

    Args:
        request: what was asked for.
        rows: the shortest step first; those that do not fit into memory, or are not verified, after the others.
        unavailable: the schedules that cannot be built for these numbers, and why.
    """

    request: Request
    rows: tuple[Row, ...]
    unavailable: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Row | None:
        """The marked row, or None where nothing fits."""
        return next((row for row in self.rows if row.is_best), None)


def compare(
    request: Request,
    *,
    search: bool = True,
    two_copies: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """Build, verify and simulate every registered schedule, and search for a better one.

    Args:
        request: what to compare for.
        search: whether to search for a tailored program, the row `auto`. It is no worse than any other that
            fits, in step time, since the search begins at those.
        two_copies: whether schedules that keep two copies of the parameters may be the best one, and the search begin
            at them.
        progress: is told the name of each schedule when its turn comes.
    """
    rows: list[Row] = []
    unavailable: list[tuple[str, str]] = []
    sound: list[Program] = []
    for name, program in build_all(request.n_ranks, request.n_microbatches, request.stages_per_rank):
        progress(name)
        if isinstance(program, str):
            unavailable.append((name, " ".join(program.split())))
            continue
        try:
            row = _row(name, program, request)
        except ProgramError as error:
            unavailable.append((name, str(error).splitlines()[0]))
            continue
        rows.append(row)
        if row.verified:
            sound.append(program)
    if search:
        progress("auto")
        try:
            rows.append(
                _row("auto", _search(request, [each for each in sound if two_copies or len(each.chains) == 1]), request)
            )
        except PlanError as error:
            unavailable.append(("auto", str(error)))
    rows.sort(key=_rank_of)
    for place, row in enumerate(rows):
        if row.fits and row.verified and (two_copies or row.copies == 1):
            rows[place] = replace(row, is_best=True)
            break
    return Comparison(request, tuple(rows), tuple(unavailable))


def _rank_of(row: Row) -> tuple[bool, bool, float, float, float, bool]:
    span = row.bubble_ratio_by_span
    return not row.verified, not row.fits, row.step_time, span, max(row.peak_activations), row.name == "auto"


def _row(name: str, program: Program, request: Request) -> Row:
    timeline = _simulated(program, request)
    problem = ""
    try:
        prepare(program)
    except ProgramError as error:
        problem = str(error).splitlines()[0]
    peaks = timeline.peak_memory(by_stage(program, (1.0,)))
    memory = timeline.peak_memory(by_stage(program, request.activation)) if request.activation else peaks
    return Row(
        name=name,
        step_time=timeline.step_time,
        bubble_ratio=timeline.bubble_ratio,
        bubble_ratio_by_span=timeline.bubble_ratio_by_span,
        peak_activations=tuple(int(peak) if peak == int(peak) else peak for peak in peaks),
        peak_memory=memory,
        transfers=_count_transfers(program),
        verified=not problem,
        stages_per_rank=len(program.chains[0].stages) // request.n_ranks,
        copies=len(program.chains),
        exposed_transfer=timeline.exposed_transfer,
        fits=request.memory is None or max(memory) <= request.memory * (1 + 1e-9),
        problem=problem,
    )


def _count_transfers(program: Program) -> int:
    """Count the messages between ranks: one forward and one back for each microbatch and each cut between ranks."""
    count = 0
    for stage in range(program.n_stages):
        after = program.next_stage(stage)
        if after is not None and program.placement[after] != program.placement[stage]:
            count += 2 * len(program.microbatches_of(stage))
    return count


def _simulated(program: Program, request: Request) -> Timeline:
    return simulate(
        program,
        forward=by_stage(program, request.forward),
        input_backward=by_stage(program, request.input_backward),
        weight_backward=by_stage(program, request.weight_backward),
        hop=request.hop,
        message_bytes=request.message_bytes,
        bandwidth=request.bandwidth,
        busy_links=True,
    )


def _search(request: Request, sound: Sequence[Program]) -> Program:
    """Find the best program for any of the placements that the schedules have.

    A second copy of the parameters is expensive: placements with one are considered only where, without a search, they
    beat what a search finds for all others.
    """
    single = [program for program in sound if len(program.chains) == 1]
    best = choose(_found(request, single))
    rest = [program for program in sound if len(program.chains) > 1]
    if best is None or any(each.step_time < best.step_time for each in _found(request, rest, search=False)):
        best = choose(_found(request, sound))
    if best is None:
        raise PlanError(f"a memory of {request.amount(request.memory or 0)} does not hold what one microbatch needs")
    return best.program


def _found(request: Request, sound: Sequence[Program], *, search: bool = True) -> list[Candidate]:
    """Collect candidates for the placements of some programs: those within memory, and what a search finds."""
    shapes: dict[object, list[Program]] = {}
    for program in sound:
        shapes.setdefault((program.placement, program.chains), []).append(program)
    found: list[tuple[float, Stages, list[Program]]] = []
    everything: list[Candidate] = []
    for fixed in shapes.values():
        stages = _stages(fixed[0], request)
        if not _has_room(stages):
            continue
        is_big = sum(map(len, fixed[0].ranks)) > _BIG
        first = candidates(stages, fixed, _FIRST_LOOK if search and not is_big else 0)
        everything += first
        found.append((min((each.step_time + each.span for each in first), default=math.inf), stages, fixed))
    found.sort(key=lambda each: each[0])
    for _, stages, fixed in found[:2] if search else ():
        everything += candidates(stages, fixed, _SECOND_LOOK)
    return everything


def _stages(shape: Program, request: Request) -> Stages:
    costs = costs_of(
        shape,
        forward=by_stage(shape, request.forward),
        input_backward=by_stage(shape, request.input_backward),
        weight_backward=by_stage(shape, request.weight_backward),
        hop=request.hop,
        message_bytes=request.message_bytes,
        bandwidth=request.bandwidth,
    )
    memory = math.inf if request.memory is None else request.memory
    return Stages(
        shape, costs, by_stage(shape, request.activation or (1.0,)), [memory] * request.n_ranks, busy_links=True
    )


def _has_room(stages: Stages) -> bool:
    """Tell whether each rank's memory holds one microbatch of each of its stages."""
    needed = [0.0] * len(stages.memory)
    for stage, rank in enumerate(stages.shape.placement):
        needed[rank] += stages.activation[stage]
    return all(least <= most * (1 + 1e-9) for least, most in zip(needed, stages.memory, strict=True))
