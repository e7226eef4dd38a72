"""V-shaped schedules whose memory is chosen by their building block: V-Half and V-Min."""

from __future__ import annotations

from collections import deque

from pypipe.program.actions import Action, Kind
from pypipe.program.builders.registry import register
from pypipe.program.builders.v_shaped import v_placement
from pypipe.program.programs import Program

_PERIOD = 6  # F, I and W of two stages, a unit of time each


@register("v_half")
def v_half(n_ranks: int, n_microbatches: int) -> Program:
    """V-Half: half of 1F1B's activations, and half of its bubble where T_F = T_I = T_W.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362, section 3.2: a building
    block of F and I, repeated for each microbatch and squeezed, W where there is room. No rank keeps more than
    2 floor((P + 2) / 2) activations of its halves.

    Args:
        n_ranks: P; rank r holds the stages r and 2P - 1 - r.
        n_microbatches: M.

    Raises:
        ConfigurationError: P or M is below 1.
    """
    # Microbatches are a period apart, so offsets of one rank have to differ modulo the period.
    shift = 0 if n_ranks % 2 else 3
    offsets = [
        (2 * rank, 3 * n_ranks - rank - 2, 3 * n_ranks + shift + 2 * rank - 1, 6 * n_ranks + shift - rank - 2)
        for rank in range(n_ranks)
    ]
    return _squeezed("v_half", n_microbatches, offsets, 2 * ((n_ranks + 2) // 2))


@register("v_min")
def v_min(n_ranks: int, n_microbatches: int) -> Program:
    """V-Min: the fewest activations of the V-shaped schedules, a third of 1F1B's, and two thirds of its bubble.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362, section 3.2; as `v_half`,
    with another building block. No rank keeps more than 2 floor((P + 4) / 3) activations of its halves.

    Args:
        n_ranks: P; rank r holds the stages r and 2P - 1 - r.
        n_microbatches: M.

    Raises:
        ConfigurationError: P or M is below 1.
    """
    shift = 0 if n_ranks % 3 else 2
    offsets = [
        (rank, 2 * n_ranks - rank - 1, 2 * n_ranks + shift + rank, 4 * n_ranks + shift - rank - 1)
        for rank in range(n_ranks)
    ]
    return _squeezed("v_min", n_microbatches, offsets, 2 * ((n_ranks + 4) // 3))


def _squeezed(name: str, n_microbatches: int, offsets: list[tuple[int, int, int, int]], cap: int) -> Program:
    """Repeat a building block for each microbatch, and run each rank's F and I as early as their order allows.

    All actions take one unit of time. A rank that has to wait for its next F or I, or has no room for another
    activation, does the W that waits longest.

    Args:
        name: the program's.
        n_microbatches: M.
        offsets: for each rank, when a microbatch passes it: F down, F up, I down and I up the V.
        cap: the most activations that a rank keeps.
    """
    n_ranks = len(offsets)
    last = 2 * n_ranks - 1
    orders: list[deque[Action]] = []
    for rank, (down, up, back_down, back_up) in enumerate(offsets):
        block = [
            (down, rank, Kind.F),
            (up, last - rank, Kind.F),
            (back_down, last - rank, Kind.I),
            (back_up, rank, Kind.I),
        ]
        times = sorted(
            (offset + _PERIOD * microbatch, stage, kind, microbatch)
            for offset, stage, kind in block
            for microbatch in range(n_microbatches)
        )
        orders.append(deque(Action(stage, kind, microbatch) for _, stage, kind, microbatch in times))
    lists: list[list[Action]] = [[] for _ in offsets]
    waiting: list[deque[Action]] = [deque() for _ in offsets]
    alive = [0] * n_ranks
    done: set[Action] = set()

    def may_run(action: Action, rank: int) -> bool:
        stage, kind, microbatch = action
        if kind is Kind.F:
            return alive[rank] < cap and (stage == 0 or Action(stage - 1, Kind.F, microbatch) in done)
        before = Action(stage + 1, Kind.I, microbatch) if stage < last else Action(stage, Kind.F, microbatch)
        return before in done

    while any(orders) or any(waiting):
        ended = []
        for rank, order in enumerate(orders):
            if order and may_run(order[0], rank):
                action = order.popleft()
                if action.kind is Kind.F:
                    alive[rank] += 1
                else:
                    waiting[rank].append(Action(action.stage, Kind.W, action.microbatch))
            elif waiting[rank]:
                action = waiting[rank].popleft()
                alive[rank] -= 1
            else:
                continue
            ended.append(action)
            lists[rank].append(action)
        done.update(ended)
    return Program(name, n_microbatches, v_placement(n_ranks), tuple(map(tuple, lists)))
