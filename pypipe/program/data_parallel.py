"""What a stage does once a step together with its data-parallel replicas: UNSHARD, RESHARD and REDUCE_GRAD.

All replicas of a pipeline run the same program, so the ranks that hold one stage have these actions at the same place
of the same list. Any of them may wait there for its replicas: they come, since each pipeline by itself gets as far as
that place whatever the others do before it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from pypipe.program.actions import Action, Kind
from pypipe.program.errors import fault
from pypipe.program.programs import Program

_ADDS_GRADIENTS = (Kind.B, Kind.W)


def add_stage_actions(program: Program, *, reduced: Collection[int] = (), sharded: Collection[int] = ()) -> Program:
    """Insert what replicated stages do once a step.

    REDUCE_GRAD stands after the stage's last B or W, and so may fill a bubble in which other ranks still compute;
    UNSHARD stands before the stage's first compute action, RESHARD after its last one and after its REDUCE_GRAD. Each
    stands behind the transfers there, so that no other rank waits for a message meanwhile. What the program lists of a
    stage already stays as it is.

    Args:
        program: with or without transfers; a stage without backwards gets no REDUCE_GRAD.
        reduced: the stages whose gradients are reduced among replicas.
        sharded: the stages whose parameters are sharded among replicas.

    Returns:
        The program itself where nothing is missing.
    """
    listed = {(a.stage, a.kind) for actions in program.ranks for a in actions if a.kind.is_per_stage}
    missing = {(stage, Kind.REDUCE_GRAD) for stage in reduced} - listed
    missing |= {(s, kind) for s in sharded if (s, Kind.UNSHARD) not in listed for kind in (Kind.UNSHARD, Kind.RESHARD)}
    if not missing:
        return program
    return replace(program, ranks=tuple(tuple(_extended(actions, missing)) for actions in program.ranks))


def _extended(actions: Sequence[Action], missing: set[tuple[int, Kind]]) -> list[Action]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    last_adding: dict[int, int] = {}
    for position, (stage, kind, _) in enumerate(actions):
        if kind.is_transfer:
            continue
        last[stage] = position
        if kind.is_compute:
            first.setdefault(stage, position)
        if kind in _ADDS_GRADIENTS:
            last_adding[stage] = position
    before: dict[int, list[Action]] = {}
    behind: dict[int, list[Action]] = {}
    for kind, places, target in (
        (Kind.UNSHARD, first, before),
        (Kind.REDUCE_GRAD, last_adding, behind),
        (Kind.RESHARD, last, behind),
    ):
        for stage, position in places.items():
            if (stage, kind) in missing:
                target.setdefault(position, []).append(Action(stage, kind, 0))
    extended: list[Action] = []
    due: list[Action] = []
    for position, action in enumerate(actions):
        if due and not action.kind.is_transfer:
            extended += due
            due = []
        extended += before.get(position, ())
        extended.append(action)
        due += behind.get(position, ())
    return extended + due


def put_back(lowered: Program, original: Program) -> Program:
    """Give a program that was lowered without them the actions of this file that it had, behind the transfers there.

    Args:
        lowered: with transfers, and the compute actions of `original`.
        original: without transfers.
    """
    if lowered.ranks and not any(action.kind.is_per_stage for actions in original.ranks for action in actions):
        return lowered
    ranks = []
    for with_transfers, listed in zip(lowered.ranks, original.ranks, strict=True):
        rest = list(reversed(listed))
        merged: list[Action] = []
        for action in with_transfers:
            if action.kind.is_compute:
                while rest[-1].kind.is_per_stage:
                    merged.append(rest.pop())
                rest.pop()
            merged.append(action)
        ranks.append((*merged, *reversed(rest)))
    return replace(lowered, ranks=tuple(ranks))


def check_stage_actions(program: Program) -> None:
    """Check what `verify` requires of UNSHARD, RESHARD and REDUCE_GRAD.

    A stage has one REDUCE_GRAD at most, after its last B or W: an earlier one would miss gradients, a second one would
    reduce twice. Where a stage has an UNSHARD, each of its compute actions stands between an UNSHARD and the next
    RESHARD, and a RESHARD comes last, so that the step ends with as little memory as it began with.

    Raises:
        ProgramError: one of these is not so.
    """
    for rank, actions in enumerate(program.ranks):
        if not any(action.kind.is_per_stage for action in actions):
            continue
        reduced: dict[int, int] = {}
        shards = {action.stage for action in actions if action.kind is Kind.UNSHARD}
        unsharded: dict[int, int] = {}
        for position, action in enumerate(actions):
            stage, kind, _ = action
            if kind is Kind.REDUCE_GRAD:
                if stage in reduced:
                    what = f"it stands at position {reduced[stage]} already: gradients are reduced once a step"
                    raise fault(program, what, action, {rank: position})
                reduced[stage] = position
            elif kind in _ADDS_GRADIENTS and stage in reduced:
                what = f"its gradients come too late for the REDUCE_GRAD at position {reduced[stage]}; list it before"
                raise fault(program, what, action, {rank: position})
            elif kind is Kind.UNSHARD:
                if stage in unsharded:
                    what = f"the stage is unsharded since position {unsharded[stage]}; list a RESHARD between the two"
                    raise fault(program, what, action, {rank: position})
                unsharded[stage] = position
            elif kind is Kind.RESHARD or (kind.is_compute and stage in shards):
                if stage not in unsharded:
                    what = "the stage is not unsharded here; list an UNSHARD before"
                    raise fault(program, what, action, {rank: position})
                if kind is Kind.RESHARD:
                    del unsharded[stage]
        for stage in unsharded:
            what = f"missing: stage {stage} stays unsharded after the step; list it after the stage's last action"
            raise fault(program, what, Action(stage, Kind.RESHARD, 0), {rank: len(actions)})
