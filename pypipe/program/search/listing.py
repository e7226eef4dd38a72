"""The list scheduler: makes a program by letting each rank do what it prefers whenever it is free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush

from pypipe.program.search.setting import Lists, Setting


@dataclass(frozen=True, slots=True)
class Preference:
    """What a free rank prefers.

    Args:
        limits: for each stage, the most microbatches whose F has run and whose I has not.
        wait_share: where the next F or I is known to come within this share of a W's time, the rank waits for it
            instead of starting a W: 0 for never waiting.
        forward_first: whether an F goes before an I where both are ready.
    """

    limits: tuple[int, ...]
    wait_share: float
    forward_first: bool


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What a preference or a move led to.

    Args:
        step_time: the end of the last action.
        span: the longest time from a rank's first start to its last end.
        lists: the actions.
    """

    step_time: float
    span: float
    lists: Lists

    @property
    def score(self) -> float:
        """What the search minimizes: the step's time where steps are apart, plus that where they overlap."""
        return self.step_time + self.span


class _Stages:
    """How far the simulated stages are.

    Attributes:
        counts: for each stage, how many microbatches it has.
        first: for F, I and W, the number of each stage's first action.
        n_done: for F, I and W, how many of them each stage has run.
        inputs, gradients: when those of each stage's microbatches arrive, in order, as far as that is known.
        room: for each rank, what its memory has left.
    """

    __slots__ = ("counts", "first", "gradients", "inputs", "n_done", "room")

    def __init__(self, setting: Setting) -> None:
        stages = range(setting.n_stages)
        self.counts = [len(setting.microbatches_of(stage)) for stage in stages]
        size = setting.n_stages * setting.n_microbatches
        starts = [stage * setting.n_microbatches + setting.microbatches_of(stage).start for stage in stages]
        self.first = [[kind * size + start for start in starts] for kind in range(3)]
        self.n_done = [0] * len(stages), [0] * len(stages), [0] * len(stages)
        self.inputs = [[0.0] * self.counts[stage] if setting.before[stage] < 0 else [] for stage in stages]
        self.gradients: list[list[float]] = [[] for _ in stages]
        tolerance = 1e-9 * max(setting.memory) if math.isfinite(max(setting.memory)) else 0.0
        self.room = [memory + tolerance for memory in setting.memory]


def schedule(setting: Setting, preference: Preference) -> Scheduled:
    """Let simulated ranks follow a preference.

    A rank that is free takes an I or an F that is there, in the order that the preference says; else a W, which fills
    the time until one comes; else it waits. An F is started only where memory suffices, also for what other stages of
    the rank must have (see `Setting`), so that the ranks never wait for each other forever. The idea, I before W and W
    in the gaps under a memory limit, is that of Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241,
    section 3.1; here time runs through all ranks at once, and the placement may be any.

    Args:
        setting: each rank's memory holds one microbatch of each of its stages at least.
        preference: its limits are 1 or more.
    """
    stages = _Stages(setting)
    counts, first, n_done = stages.counts, stages.first, stages.n_done
    inputs, gradients, room = stages.inputs, stages.gradients, stages.room
    n_forward, n_input, n_weight = n_done
    placement, before, after, delays = setting.placement, setting.before, setting.after, setting.delays
    stages_on, reserving = setting.stages_on, setting.reserving
    activation, durations = setting.activation, setting.durations
    limits, wait_share, forward_first = preference.limits, preference.wait_share, preference.forward_first
    lists: Lists = [[] for _ in range(setting.n_ranks)]
    begin = [-1.0] * setting.n_ranks
    free = [0.0] * setting.n_ranks
    asleep = [False] * setting.n_ranks
    # There are no lists to walk through yet, and time says whose turn it is, so this loop shares nothing with the
    # simulator's. A search runs it millions of times: functions of its parts would make it slower by a quarter.
    heap = [(0.0, rank) for rank in range(setting.n_ranks)]
    while heap:
        now, rank = heappop(heap)
        # The stage of the F, I and W to run here, and the next time at which an F or I becomes possible.
        next_forward = next_input = next_weight = -1
        oldest = coming = math.inf
        for stage in stages_on[rank]:
            done, begun = n_input[stage], n_forward[stage]
            if done < len(gradients[stage]):
                arrival = gradients[stage][done]
                if arrival <= now:
                    if arrival < oldest:
                        next_input, oldest = stage, arrival
                elif arrival < coming:
                    coming = arrival
            if begun < len(inputs[stage]) and begun - done < limits[stage]:
                needed = activation[stage]
                for other in reserving[stage]:
                    if n_forward[other] == n_weight[other] < counts[other]:
                        needed += activation[other]
                if needed <= room[rank]:
                    arrival = inputs[stage][begun]
                    if arrival <= now:
                        next_forward = stage
                    elif arrival < coming:
                        coming = arrival
            waiting = done - n_weight[stage]
            if waiting and (next_weight < 0 or waiting > n_input[next_weight] - n_weight[next_weight]):
                next_weight = stage
        if next_forward >= 0 and (next_input < 0 or forward_first):
            kind, stage = 0, next_forward
        elif next_input >= 0:
            kind, stage = 1, next_input
        elif next_weight >= 0 and coming - now >= wait_share * durations[2][next_weight]:
            kind, stage = 2, next_weight
        elif coming < math.inf:
            heappush(heap, (coming, rank))
            continue
        else:
            asleep[rank] = True
            continue
        if begin[rank] < 0:
            begin[rank] = now
        free[rank] = end = now + durations[kind][stage]
        heappush(heap, (end, rank))
        index = n_done[kind][stage]
        n_done[kind][stage] = index + 1
        lists[rank].append(first[kind][stage] + index)
        target = -1
        if kind == 0:
            room[rank] -= activation[stage]
            target = after[stage]
            if target < 0:
                gradients[stage].append(end)
            else:
                inputs[target].append(end + delays[stage])
        elif kind == 1:
            target = before[stage]
            if target >= 0:
                gradients[target].append(end + delays[target])
        else:
            room[rank] += activation[stage]
        if target >= 0 and asleep[placement[target]]:
            woken = placement[target]
            asleep[woken] = False
            heappush(heap, (max(now, free[woken]), woken))
    return Scheduled(max(free), max(end - max(start, 0.0) for start, end in zip(begin, free, strict=True)), lists)
