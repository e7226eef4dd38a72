"""Lists of actions that several schedules share: each rank alternates forwards and backwards after a warm-up."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from pypipe.program.actions import Action, Kind

Place = tuple[int, int]
"""A stage and a microbatch."""


def alternate(
    forwards: Sequence[Place], backwards: Sequence[Place], n_warmup: int, weight_lag: int | None = None
) -> tuple[Action, ...]:
    """Warm up with forwards, then do a forward and a backward in turn, then the other backwards.

    Args:
        forwards: the rank's forwards in order.
        backwards: its backwards in order, as many.
        n_warmup: how many forwards come before the first forward that a backward follows; more than there are
            means all of them.
        weight_lag: None for full backwards. A number splits them: each I is followed by the W of the I that many
            earlier, and the W left over come last.
    """
    n_warmup = min(n_warmup, len(forwards))
    actions = [Action(stage, Kind.F, microbatch) for stage, microbatch in forwards[:n_warmup]]
    for index, (stage, microbatch) in enumerate(backwards):
        if n_warmup + index < len(forwards):
            next_stage, next_microbatch = forwards[n_warmup + index]
            actions.append(Action(next_stage, Kind.F, next_microbatch))
        if weight_lag is None:
            actions.append(Action(stage, Kind.B, microbatch))
            continue
        actions.append(Action(stage, Kind.I, microbatch))
        if index >= weight_lag:
            lagging_stage, lagging_microbatch = backwards[index - weight_lag]
            actions.append(Action(lagging_stage, Kind.W, lagging_microbatch))
    if weight_lag:
        actions.extend(Action(stage, Kind.W, microbatch) for stage, microbatch in backwards[-weight_lag:])
    return tuple(actions)


def looped_orders(
    rank: int, n_ranks: int, n_microbatches: int, stages_per_rank: int
) -> tuple[list[Place], list[Place], int]:
    """Order a looped placement depth first: a group of microbatches passes all stages of a rank, then the next.

    Megatron-LM's groups have P microbatches, so that M has to be a multiple of P. Here M is cut into
    max(1, M // P) groups of sizes that differ by one at most: each has P microbatches or more unless M < P, which
    is what keeps the loop from the last rank to the first busy, and any M is allowed.

    Args:
        rank: whose orders.
        n_ranks: P.
        n_microbatches: M.
        stages_per_rank: v; rank r holds the stages r, r + P, r + 2P, ...

    Returns:
        The rank's forwards in order, its backwards in order, and the size of the largest group.
    """
    n_groups = max(1, n_microbatches // n_ranks)
    smaller, n_larger = divmod(n_microbatches, n_groups)
    stages = range(rank, n_ranks * stages_per_rank, n_ranks)
    forwards: list[Place] = []
    backwards: list[Place] = []
    first = 0
    for group in range(n_groups):
        microbatches = range(first, first + smaller + (group < n_larger))
        first = microbatches.stop
        forwards.extend((stage, microbatch) for stage in stages for microbatch in microbatches)
        backwards.extend((stage, microbatch) for stage in reversed(stages) for microbatch in microbatches)
    return forwards, backwards, smaller + (n_larger > 0)


def keep_microbatches(actions: Sequence[Action], n_microbatches: int) -> tuple[Action, ...]:
    """Keep the actions of the first microbatches only.

    A program that is sound stays sound without a microbatch, so schedules whose phases need many microbatches
    are built with enough of them and then cut to the number wanted.
    """
    return tuple(action for action in actions if action.microbatch < n_microbatches)


class PhaseList:
    """One rank's list while it is written phase by phase; each stage's actions take microbatches 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[int, Kind]] = Counter()
        self._waiting: deque[Place] = deque()

    def forward(self, stage: int) -> None:
        """Append the F of the stage's next microbatch."""
        self._append(stage, Kind.F, Kind.F)

    def backward(self, stage: int) -> None:
        """Append the B of the stage's next microbatch."""
        self._append(stage, Kind.B, Kind.B)

    def input_half(self, stage: int) -> None:
        """Append the I of the stage's next microbatch; its W waits behind those of earlier I."""
        self._waiting.append((stage, self._append(stage, Kind.I, Kind.B)))

    def weight_half(self, stage: int | None = None) -> None:
        """Append the W that waits longest (of a stage, where one is given)."""
        place = next(place for place in self._waiting if stage is None or place[0] == stage)
        self._waiting.remove(place)
        self.actions.append(Action(place[0], Kind.W, place[1]))

    def count(self, stage: int, kind: Kind) -> int:
        """Count the stage's actions of a kind so far: the microbatch of its next F, or next backward."""
        return self._next[stage, kind]

    def n_waiting(self, stage: int | None = None) -> int:
        """Count the W that wait (of a stage, where one is given)."""
        return sum(stage is None or place[0] == stage for place in self._waiting)

    def _append(self, stage: int, kind: Kind, counted: Kind) -> int:
        microbatch = self._next[stage, counted]
        self._next[stage, counted] += 1
        self.actions.append(Action(stage, kind, microbatch))
        return microbatch
