"""Schedules with a looped placement: rank r holds the stages r, r + P, r + 2P, ..."""

from __future__ import annotations

from pypipe.program.actions import Action, Kind
from pypipe.program.builders.lists import alternate, looped_orders
from pypipe.program.builders.registry import register
from pypipe.program.programs import Program


@register("interleaved")
def interleaved(n_ranks: int, n_microbatches: int, *, stages_per_rank: int = 2) -> Program:
    """Interleaved 1F1B: depth first, so that few microbatches are alive; the bubble is 1/v of 1F1B's.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2.2 and figure 4. M need not be a multiple of P: see
    `lists.looped_orders`. A rank warms up with (v - 1) groups and 2 (P - 1 - rank) forwards more.

    Args:
        n_ranks: P.
        n_microbatches: M.
        stages_per_rank: v.

    Raises:
        ConfigurationError: one of the numbers is below 1.
    """
    return _depth_first("interleaved", n_ranks, n_microbatches, stages_per_rank, hops=2 if stages_per_rank > 1 else 1)


@register("interleaved_zb")
def interleaved_zero_bubble(n_ranks: int, n_microbatches: int, *, stages_per_rank: int = 2) -> Program:
    """Interleaved 1F1B with split backwards: each W waits until the ranks after this one have their gradients.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.2.1 (ZB-H1), with
    the placement of arXiv 2104.04473; the schedule that torch calls ScheduleInterleavedZeroBubble.

    Args:
        n_ranks: P.
        n_microbatches: M.
        stages_per_rank: v.

    Raises:
        ConfigurationError: one of the numbers is below 1.
    """
    return _depth_first("interleaved_zb", n_ranks, n_microbatches, stages_per_rank, hops=1, is_split=True)


@register("looped_bfs")
def looped_bfs(n_ranks: int, n_microbatches: int, *, stages_per_rank: int = 2) -> Program:
    """Looped BFS: breadth first: every microbatch passes a rank's stage before its next stage starts.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", arXiv 2211.05953, section 4. The bubble is that of
    interleaved 1F1B; all v M activations of a rank are alive at once, as in GPipe.

    Args:
        n_ranks: P.
        n_microbatches: M.
        stages_per_rank: v.

    Raises:
        ConfigurationError: one of the numbers is below 1.
    """
    microbatches = range(n_microbatches)
    lists = []
    for rank in range(n_ranks):
        stages = range(rank, n_ranks * stages_per_rank, n_ranks)
        actions = [Action(stage, Kind.F, microbatch) for stage in stages for microbatch in microbatches]
        for stage in reversed(stages):
            actions.extend(Action(stage, Kind.B, microbatch) for microbatch in reversed(microbatches))
        lists.append(tuple(actions))
    return Program("looped_bfs", n_microbatches, _looped_placement(n_ranks, stages_per_rank), tuple(lists))


def _depth_first(
    name: str, n_ranks: int, n_microbatches: int, stages_per_rank: int, *, hops: int, is_split: bool = False
) -> Program:
    """A program that alternates after a warm-up of (v - 1) groups, and `hops` forwards more on each earlier rank."""
    lists = []
    for rank in range(n_ranks):
        forwards, backwards, group = looped_orders(rank, n_ranks, n_microbatches, stages_per_rank)
        n_warmup = (stages_per_rank - 1) * group + hops * (n_ranks - 1 - rank)
        lists.append(alternate(forwards, backwards, n_warmup, rank if is_split else None))
    return Program(name, n_microbatches, _looped_placement(n_ranks, stages_per_rank), tuple(lists))


def _looped_placement(n_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    return tuple(range(n_ranks)) * stages_per_rank
