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
        patience: where the next F or I is known to come within this share of a W's time, the rank waits for it
            instead of starting a W: 0 for never waiting.
        forward_first: whether an F goes before an I where both are ready.
    """

    limits: tuple[int, ...]
    patience: float
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
        """What the search makes small: the step's time where steps are apart, and where they overlap."""
        return self.step_time + self.span


def schedule(setting: Setting, preference: Preference) -> Scheduled:
    """Let simulated ranks follow a preference.

    A rank that is free takes an I or an F that is there, in the order that the preference says; else a W, which fills
    the time until one comes; else it waits. An F is started only where memory suffices, also for what other stages of
    the rank must have (see `Setting`), so that the ranks never wait for each other for ever. The idea, I before W and W
    in the gaps under a memory limit, is that of Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241,
    section 3.1; here time runs through all ranks at once, and the placement may be any.

    Args:
        setting: each rank's memory holds one microbatch of each of its stages at least.
        preference: its limits are 1 or more.
    """
    n_stages, n_microbatches, placement = setting.n_stages, setting.n_microbatches, setting.placement
    before, after, delays, activation = setting.before, setting.after, setting.delays, setting.activation
    forward, input_half, weight_half = setting.durations
    size = n_stages * n_microbatches
    limits, patience, forward_first = preference.limits, preference.patience, preference.forward_first
    n_forward, n_input, n_weight = [0] * n_stages, [0] * n_stages, [0] * n_stages
    counts = [len(setting.microbatches_of(stage)) for stage in range(n_stages)]
    firsts = [setting.microbatches_of(stage).start for stage in range(n_stages)]
    # When each stage's inputs and gradients arrive, as far as that is known, in the order of its microbatches.
    inputs: list[list[float]] = [[0.0] * counts[s] if before[s] < 0 else [] for s in range(n_stages)]
    gradients: list[list[float]] = [[] for _ in range(n_stages)]
    tolerance = 1e-9 * max(setting.memory) if math.isfinite(max(setting.memory)) else 0.0
    room = [memory + tolerance for memory in setting.memory]
    lists: Lists = [[] for _ in range(setting.n_ranks)]
    begin: list[float] = [-1.0] * setting.n_ranks
    free = [0.0] * setting.n_ranks
    asleep = [False] * setting.n_ranks
    # There are no lists to walk through yet, and time says whose turn it is: this loop is its own.
    heap = [(0.0, rank) for rank in range(setting.n_ranks)]
    while heap:
        now, rank = heappop(heap)
        # The stage of the F, I and W to run here, and the next time at which an F or I becomes possible.
        next_forward = next_input = next_weight = -1
        oldest = coming = math.inf
        for stage in setting.stages_on[rank]:
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
                for other in setting.reserving[stage]:
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
        elif next_weight >= 0 and coming - now >= patience * weight_half[next_weight]:
            kind, stage = 2, next_weight
        elif coming < math.inf:
            heappush(heap, (coming, rank))
            continue
        else:
            asleep[rank] = True
            continue
        if begin[rank] < 0:
            begin[rank] = now
        target = -1
        if kind == 0:
            end, index = now + forward[stage], n_forward[stage]
            n_forward[stage] = index + 1
            room[rank] -= activation[stage]
            target = after[stage]
            if target < 0:
                gradients[stage].append(end)
            else:
                inputs[target].append(end + delays[stage])
        elif kind == 1:
            end, index = now + input_half[stage], n_input[stage]
            n_input[stage] = index + 1
            target = before[stage]
            if target >= 0:
                gradients[target].append(end + delays[target])
        else:
            end, index = now + weight_half[stage], n_weight[stage]
            n_weight[stage] = index + 1
            room[rank] += activation[stage]
        lists[rank].append(kind * size + stage * n_microbatches + firsts[stage] + index)
        free[rank] = end
        heappush(heap, (end, rank))
        if target >= 0 and asleep[placement[target]]:
            woken = placement[target]
            asleep[woken] = False
            heappush(heap, (max(now, free[woken]), woken))
    return Scheduled(max(free), max(end - max(start, 0.0) for start, end in zip(begin, free, strict=True)), lists)
