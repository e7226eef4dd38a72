"""Schedules with one stage on each rank and full backwards: naive, GPipe, 1F1B."""

from __future__ import annotations

from pypipe.program.actions import Action, Kind
from pypipe.program.builders.lists import alternate
from pypipe.program.builders.registry import register
from pypipe.program.programs import Program


@register("naive")
def naive(n_ranks: int, n_microbatches: int) -> Program:
    """Naive model parallelism: a microbatch goes forward and backward through all ranks before the next one starts.

    Source: Huang et al., "GPipe", arXiv 1811.06965, figure 2b. One rank computes at any time: utilization is 1/P
    whatever M is, and a rank keeps the activations of one microbatch.

    Args:
        n_ranks: P; rank r holds stage r.
        n_microbatches: M.

    Raises:
        ConfigurationError: P or M is below 1.
    """
    return _alternating("naive", n_ranks, n_microbatches, [0] * n_ranks)


@register("gpipe")
def gpipe(n_ranks: int, n_microbatches: int) -> Program:
    """GPipe: every forward, then every backward in reverse order of microbatches.

    Source: Huang et al., "GPipe", arXiv 1811.06965, section 2.2 and figure 2c.

    Args:
        n_ranks: P; rank r holds stage r.
        n_microbatches: M.

    Raises:
        ConfigurationError: P or M is below 1.
    """
    microbatches = range(n_microbatches)
    return Program(
        name="gpipe",
        n_microbatches=n_microbatches,
        placement=tuple(range(n_ranks)),
        ranks=tuple(
            (
                *(Action(stage, Kind.F, microbatch) for microbatch in microbatches),
                *(Action(stage, Kind.B, microbatch) for microbatch in reversed(microbatches)),
            )
            for stage in range(n_ranks)
        ),
    )


@register("1f1b")
def one_f_one_b(n_ranks: int, n_microbatches: int) -> Program:
    """1F1B with a flush: warm-up forwards, then a forward and a backward in turn, then the other backwards.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", arXiv 2104.04473, section 2.2.1 (PipeDream-Flush). A rank warms up with
    min(M, P - 1 - rank) forwards, so M may be smaller than P.

    Args:
        n_ranks: P; rank r holds stage r.
        n_microbatches: M.

    Raises:
        ConfigurationError: P or M is below 1.
    """
    return _alternating("1f1b", n_ranks, n_microbatches, [n_ranks - 1 - rank for rank in range(n_ranks)])


def _alternating(name: str, n_ranks: int, n_microbatches: int, n_warmup: list[int]) -> Program:
    places = [[(stage, microbatch) for microbatch in range(n_microbatches)] for stage in range(n_ranks)]
    return Program(
        name=name,
        n_microbatches=n_microbatches,
        placement=tuple(range(n_ranks)),
        ranks=tuple(alternate(places[stage], places[stage], n_warmup[stage]) for stage in range(n_ranks)),
    )
