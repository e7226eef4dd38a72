"""Positions: where each action stands in its rank's list. Finding them proves the compute actions complete."""

from __future__ import annotations

from dataclasses import dataclass

from pypipe.program.actions import Action, Kind
from pypipe.program.errors import ProgramError, fault
from pypipe.program.programs import Program


@dataclass(frozen=True, slots=True)
class Positions:
    """Where a program's actions stand; tables are flat: stage s, microbatch m has the entry s * M + m.

    Args:
        tables: for each kind, the position in its rank's list, or -1 for an action that is not there.
        backward: the position of the B or else the I: where the incoming gradient is used and the outgoing
            one is made; -1 where there is no backward.
        release: the position of the B or else the W (the F in a forward-only program): the last action that
            needs the microbatch's input, activations and incoming gradient.
        is_forward_only: whether the program has no backward at all.
    """

    tables: dict[Kind, list[int]]
    backward: list[int]
    release: list[int]
    is_forward_only: bool


def find_positions(program: Program) -> Positions:
    """Locate every action, and check what needs neither transfers nor the order of other ranks.

    That is: each action stands on the rank where its stage is placed, and at most once; each stage has for
    each of its microbatches one F, and one B or else one I and one W (only F where the program is
    forward-only); in a rank's list F comes before B or I, I before W, and where a stage's neighbour is on the
    same rank, each comes after the action whose result it takes.

    Args:
        program: with or without transfers.

    Raises:
        ProgramError: one of these rules is broken.
    """
    tables = _locate(program)
    is_forward_only = not any(
        action.kind.is_compute and action.kind is not Kind.F for actions in program.ranks for action in actions
    )
    positions = Positions(
        tables,
        backward=_first_present(tables[Kind.B], tables[Kind.I]),
        release=tables[Kind.F] if is_forward_only else _first_present(tables[Kind.B], tables[Kind.W]),
        is_forward_only=is_forward_only,
    )
    for stage in range(program.n_stages):
        _check_complete(program, positions, stage)
    for stage in range(program.n_stages):
        _check_order(program, positions, stage)
    return positions


def _first_present(preferred: list[int], other: list[int]) -> list[int]:
    return [a if a >= 0 else b for a, b in zip(preferred, other, strict=True)]


def _locate(program: Program) -> dict[Kind, list[int]]:
    n_stages, n_microbatches, placement = program.n_stages, program.n_microbatches, program.placement
    shares = [program.microbatches_of(stage) for stage in range(n_stages)]
    firsts, stops = [share.start for share in shares], [share.stop for share in shares]
    tables = {kind: [-1] * (n_stages * n_microbatches) for kind in Kind if not kind.is_per_stage}
    for rank, actions in enumerate(program.ranks):
        for position, (stage, kind, microbatch) in enumerate(actions):
            if kind.is_per_stage:  # their order is for check_stage_actions() to look at
                if not 0 <= stage < n_stages or placement[stage] != rank:
                    raise _misplaced(program, tables, rank, position)
                continue
            if (
                not 0 <= stage < n_stages
                or placement[stage] != rank
                or not firsts[stage] <= microbatch < stops[stage]
                or tables[kind][stage * n_microbatches + microbatch] >= 0
            ):
                raise _misplaced(program, tables, rank, position)
            tables[kind][stage * n_microbatches + microbatch] = position
    return tables


def _misplaced(program: Program, tables: dict[Kind, list[int]], rank: int, position: int) -> ProgramError:
    """Explain why an action must not stand on its rank, or not a second time."""
    action = program.ranks[rank][position]
    stage, kind, microbatch = action
    if not 0 <= stage < program.n_stages:
        what = f"stages are 0..{program.n_stages - 1}"
    elif program.placement[stage] != rank:
        what = f"stage {stage} is placed on rank {program.placement[stage]}, so only that rank can run this"
    elif microbatch not in program.microbatches_of(stage):
        mine = program.microbatches_of(stage)
        what = f"the microbatches of stage {stage} are {mine[0]}..{mine[-1]}" if mine else "no microbatch passes it"
    else:
        earlier = tables[kind][stage * program.n_microbatches + microbatch]
        what = f"it stands at position {earlier} already; list each action once"
    return fault(program, what, action, {rank: position})


def _check_complete(program: Program, positions: Positions, stage: int) -> None:
    forward, full, input_half, weight_half = (positions.tables[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    for microbatch in program.microbatches_of(stage):
        key = stage * program.n_microbatches + microbatch
        if forward[key] < 0:
            raise _missing(program, Action(stage, Kind.F, microbatch))
        if positions.is_forward_only:
            continue
        if full[key] >= 0:
            for kind, table in ((Kind.I, input_half), (Kind.W, weight_half)):
                if table[key] >= 0:
                    what = f"the full backward at position {full[key]} does this too; list B, or I and W"
                    raise fault(program, what, Action(stage, kind, microbatch), {program.placement[stage]: table[key]})
        elif input_half[key] < 0:
            raise _missing(program, Action(stage, Kind.I if weight_half[key] >= 0 else Kind.B, microbatch))
        elif weight_half[key] < 0:
            raise _missing(program, Action(stage, Kind.W, microbatch))


def _missing(program: Program, action: Action) -> ProgramError:
    rank = program.placement[action.stage]
    what = f"missing: rank {rank} has stage {action.stage}, and must run this once for each microbatch"
    return fault(program, what, action, {rank: len(program.ranks[rank])})


def _check_order(program: Program, positions: Positions, stage: int) -> None:
    """Check a stage's order against itself and against its neighbours on the same rank."""
    placement, n_microbatches = program.placement, program.n_microbatches
    forward, backward, input_half = positions.tables[Kind.F], positions.backward, positions.tables[Kind.I]
    before, after = program.previous_stage(stage), program.next_stage(stage)
    local_before = before is not None and placement[before] == placement[stage]
    local_after = after is not None and placement[after] == placement[stage]
    for microbatch in program.microbatches_of(stage):
        key = stage * n_microbatches + microbatch
        if before is not None and local_before:
            _require_before(program, stage, microbatch, forward[before * n_microbatches + microbatch], forward[key])
        if positions.is_forward_only:
            continue
        _require_before(program, stage, microbatch, forward[key], backward[key])
        if input_half[key] >= 0:
            _require_before(program, stage, microbatch, backward[key], positions.release[key])
        if after is not None and local_after:
            _require_before(program, stage, microbatch, backward[after * n_microbatches + microbatch], backward[key])


def _require_before(program: Program, stage: int, microbatch: int, earlier: int, later: int) -> None:
    if earlier > later:
        rank = program.placement[stage]
        action, needed = program.ranks[rank][later], program.ranks[rank][earlier]
        raise fault(program, f"it needs {needed}, which comes later, at position {earlier}", action, {rank: later})
