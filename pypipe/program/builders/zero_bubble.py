"""Schedules that split backwards into I and W on a linear placement: ZB-H1 and ZB-H2."""

from __future__ import annotations

from pypipe.program.builders.lists import alternate
from pypipe.program.builders.registry import register
from pypipe.program.programs import Program


@register("zb_h1")
def zb_h1(n_ranks: int, n_microbatches: int) -> Program:
    """ZB-H1: 1F1B whose W come late, so that gradients reach the earlier ranks sooner, in 1F1B's memory.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.2.1 and figure 2
    (handcrafted for T_F = T_I = T_W). Rank r keeps r W waiting; no rank keeps more than min(M, P) activations, and
    the bubble is (P - 1)(T_F + T_I - T_W).

    Args:
        n_ranks: P; rank r holds stage r.
        n_microbatches: M.

    Raises:
        ConfigurationError: P or M is below 1.
    """
    return _handcrafted("zb_h1", n_ranks, n_microbatches, 1)


@register("zb_h2")
def zb_h2(n_ranks: int, n_microbatches: int) -> Program:
    """ZB-H2: as many forwards more as fill the warm-up's bubble, in twice 1F1B's memory.

    Source: Qi et al., arXiv 2401.10241, section 2.2.2 and figure 3 (handcrafted for T_F = T_I = T_W). Rank r warms
    up with 2 (P - 1 - r) forwards and keeps 2 r W waiting; no rank keeps more than min(M, 2P - 1) activations, and
    the bubble is (P - 1)(T_F + T_I - 2 T_W), where M >= 2P - 1.

    Args:
        n_ranks: P; rank r holds stage r.
        n_microbatches: M.

    Raises:
        ConfigurationError: P or M is below 1.
    """
    return _handcrafted("zb_h2", n_ranks, n_microbatches, 2)


def _handcrafted(name: str, n_ranks: int, n_microbatches: int, hops: int) -> Program:
    """Each rank warms up with `hops` forwards more than the rank after it, and keeps as many W less waiting."""
    lists = []
    for rank in range(n_ranks):
        places = [(rank, microbatch) for microbatch in range(n_microbatches)]
        lists.append(alternate(places, places, hops * (n_ranks - 1 - rank), hops * rank))
    return Program(name, n_microbatches, tuple(range(n_ranks)), tuple(lists))
