"""The builder `auto`: a program tailored to given times and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pypipe.errors import ConfigurationError
from pypipe.program.builders.registry import build_all, register
from pypipe.program.errors import ProgramError
from pypipe.program.programs import Program
from pypipe.program.search.candidates import N_ACTIONS, Candidate, Stages, candidates, choose
from pypipe.program.simulation.costs import Cost, costs_of


@register("auto")
def auto(
    n_ranks: int,
    n_microbatches: int,
    *,
    stages_per_rank: int = 1,
    placement: Sequence[int] | None = None,
    forward: Cost = 1.0,
    backward: Cost | None = None,
    input_backward: Cost | None = None,
    weight_backward: Cost | None = None,
    hop: Cost = 0.0,
    message_bytes: Cost = 0.0,
    bandwidth: Cost = math.inf,
    busy_links: bool = False,
    memory: Cost | None = None,
    activation: Cost = 1.0,
    effort: float = 1.0,
) -> Program:
    """Search for the best program for given times and memory; the same for the same arguments.

    The search is a list scheduler under many preferences, then moves of single actions; it starts from the fixed
    schedules with the same placement and is never worse than the best of them that fits into memory, in step time. The
    idea, I before W and W in the gaps under a memory limit, is that of Qi et al., "Zero Bubble Pipeline
    Parallelism", arXiv 2401.10241, section 3.1.

    Args:
        n_ranks: P.
        n_microbatches: M.
        stages_per_rank: v. With 1 the placement is linear; with 2 the better one of V-shaped (rank r holds r and
            2P - 1 - r) and looped (r and r + P); with more, looped.
        placement: for each stage, its rank, instead.
        forward: times, as for `simulate`; so are the next seven. The times by default make I as long as W.
        backward: B, where a full backward is cheaper than its halves; only fixed schedules use many.
        input_backward: I.
        weight_backward: W.
        hop: latency of a transfer.
        message_bytes: size of one message.
        bandwidth: bytes that a link carries in one unit of time.
        busy_links: whether a link carries one message at a time.
        memory: the most that the live activations of a rank may take at any time: one number, or one for each rank;
            None means no limit.
        activation: what one microbatch's activations take, from the start of their F to the end of their W: one
            number, or one for each stage. By default `memory` counts pairs of stage and microbatch.
        effort: how long to search, in shares of a few seconds.

    Raises:
        ConfigurationError: numbers are out of range, or memory does not hold one microbatch of each of a rank's
            stages.
    """
    shapes = _shapes(n_ranks, n_microbatches, stages_per_rank, placement)
    fixed = [
        program for _, program in build_all(n_ranks, n_microbatches, stages_per_rank) if isinstance(program, Program)
    ]
    found: list[Candidate] = []
    for shape in shapes:
        costs = costs_of(
            shape,
            forward=forward,
            backward=backward,
            input_backward=input_backward,
            weight_backward=weight_backward,
            hop=hop,
            message_bytes=message_bytes,
            bandwidth=bandwidth,
        )
        sizes = _spread("activation", activation, shape.n_stages, "stage")
        most = _spread("memory", math.inf if memory is None else memory, n_ranks, "rank")
        _require_room(shape, sizes, most)
        same = [p for p in fixed if (p.placement, p.chains) == (shape.placement, shape.chains)]
        stages = Stages(shape, costs, sizes, most, busy_links)
        found += candidates(stages, same, int(N_ACTIONS * effort / len(shapes)))
    best = choose(found)
    if best is None:
        raise ProgramError(
            f"the search found no sound program for {n_ranks} ranks and {n_microbatches} microbatches: give "
            "more memory, or name a schedule"
        )
    return replace(best.program, name="auto")


def _shapes(
    n_ranks: int, n_microbatches: int, stages_per_rank: int, placement: Sequence[int] | None
) -> tuple[Program, ...]:
    looped = tuple(range(n_ranks)) * stages_per_rank
    if placement is not None:
        placements = [tuple(placement)]
    elif stages_per_rank == 2 and n_ranks > 1:
        placements = [(*range(n_ranks), *reversed(range(n_ranks))), looped]
    else:
        placements = [looped]
    return tuple(Program("auto", n_microbatches, each, ((),) * n_ranks) for each in placements)


def _spread(name: str, value: Cost, count: int, what: str) -> list[float]:
    values = list(value) if isinstance(value, Sequence) else [value] * count
    if len(values) != count:
        raise ConfigurationError(
            f"{name} has {len(values)} entries for {count} {what}s: give one number, or one a {what}"
        )
    for index, each in enumerate(values):
        if not each >= 0:
            raise ConfigurationError(f"{name} of {what} {index} is {each}: give 0 or more")
    return values


def _require_room(shape: Program, activation: Sequence[float], memory: Sequence[float]) -> None:
    for rank, most in enumerate(memory):
        needed = sum(activation[stage] for stage, place in enumerate(shape.placement) if place == rank)
        if needed > most:
            raise ConfigurationError(
                f"memory of rank {rank} is {most:g}, but one microbatch's activations of its stages take {needed:g}: "
                "give that much at least"
            )
