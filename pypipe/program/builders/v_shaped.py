"""Schedules with a V-shaped placement: rank r holds the stages r and 2P - 1 - r."""

from __future__ import annotations

from pypipe.program.actions import Action, Kind
from pypipe.program.builders.lists import PhaseList, keep_microbatches
from pypipe.program.builders.registry import register
from pypipe.program.programs import Program


@register("zbv")
def zbv(n_ranks: int, n_microbatches: int) -> Program:
    """ZB-V: two stages a rank, no bubble where T_F = T_I = T_W, in 1F1B's memory.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 6 and figure 8 (handcrafted for
    T_F = T_I = T_W). No rank keeps more than min(2M, 2P) activations of its halves.

    Args:
        n_ranks: P; rank r holds the stages r and 2P - 1 - r.
        n_microbatches: M.

    Raises:
        ConfigurationError: P or M is below 1.
    """
    lists = [_zbv_rank(rank, n_ranks, max(n_microbatches, 2 * n_ranks - 1)) for rank in range(n_ranks)]
    kept = tuple(keep_microbatches(actions, n_microbatches) for actions in lists)
    return Program("zbv", n_microbatches, v_placement(n_ranks), kept)


def v_placement(n_ranks: int) -> tuple[int, ...]:
    """Stages 0..P-1 on the ranks in order, stages P..2P-1 on them in reverse."""
    return (*range(n_ranks), *reversed(range(n_ranks)))


def _zbv_rank(rank: int, n_ranks: int, n_microbatches: int) -> list[Action]:
    down, up = rank, 2 * n_ranks - 1 - rank
    phases = PhaseList()
    for _ in range(2 * (n_ranks - rank) - 1):
        phases.forward(down)
    for _ in range(rank):
        phases.forward(up)
        phases.forward(down)
    for _ in range(n_ranks - rank):
        phases.forward(up)
        phases.input_half(up)
        phases.weight_half()
    while phases.count(up, Kind.F) < n_microbatches:
        if phases.count(down, Kind.F) < n_microbatches:
            phases.forward(down)
        phases.input_half(down)
        phases.weight_half()
        phases.forward(up)
        phases.input_half(up)
        phases.weight_half()
    for _ in range(rank):
        phases.input_half(down)
        phases.input_half(up)
    for _ in range(n_ranks - rank):
        phases.input_half(down)
        phases.weight_half(down)
    for stage in (up, down):
        while phases.n_waiting(stage):
            phases.weight_half(stage)
    return phases.actions
