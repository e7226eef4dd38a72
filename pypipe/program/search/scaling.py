"""Small likenesses of big problems: what is good for 8 ranks says what to try on 64."""

from __future__ import annotations

import math

from pypipe.program.programs import Chain
from pypipe.program.search.listing import Preference
from pypipe.program.search.setting import Setting

_N_RANKS = 8


class Likeness:
    """A setting with few ranks, stages and microbatches in the proportions of a big one.

    Each of its stages stands for a run of neighbouring stages, with their mean costs; memory and microbatches shrink
    as the number of ranks does.

    Args:
        setting: one with more than `_N_RANKS` ranks.
    """

    def __init__(self, setting: Setting) -> None:
        self._n_stages = setting.n_stages
        self._shrink = shrink = _N_RANKS / setting.n_ranks
        # For each of the big setting's stages, where between the small one's stages it lies.
        self._places: list[float] = []
        runs: list[list[int]] = []
        chains, n_microbatches = [], 0
        for chain in setting.chains:
            first, length = len(runs), max(1, round(len(chain.stages) * shrink))
            runs += [[] for _ in range(length)]
            for index, stage in enumerate(chain.stages):
                runs[first + index * length // len(chain.stages)].append(stage)
                self._places.append(first + min(max(0.0, (index + 0.5) * length / len(chain.stages) - 0.5), length - 1))
            count = math.ceil(len(chain.microbatches) * shrink)
            chains.append(Chain(range(first, len(runs)), range(n_microbatches, n_microbatches + count)))
            n_microbatches += count
        placement = [int(setting.placement[run[len(run) // 2]] * shrink) for run in runs]
        before, after = [stage - 1 for stage in range(len(runs))], [stage + 1 for stage in range(len(runs))]
        for chain in chains:
            before[chain.stages[0]] = after[chain.stages[-1]] = -1

        def mean(values: list[float]) -> list[float]:
            return [sum(values[stage] for stage in run) / len(run) for run in runs]

        forward, input_half, weight_half = map(mean, setting.durations)
        activation = mean(setting.activation)
        on = [[stage for stage, rank in enumerate(placement) if rank == here] for here in range(_N_RANKS)]
        memory = [setting.memory[int(rank / shrink)] * shrink for rank in range(_N_RANKS)]
        self.setting = Setting(
            n_microbatches=n_microbatches,
            placement=tuple(placement),
            chains=tuple(chains),
            before=before,
            after=after,
            durations=(forward, input_half, weight_half),
            delays=mean(setting.delays),
            activation=activation,
            memory=[
                max(most, sum(activation[stage] for stage in stages)) for most, stages in zip(memory, on, strict=True)
            ],
            stages_on=on,
            reserving=[
                [
                    other
                    for other in on[placement[stage]]
                    if other > stage or not any(stage in c.stages and other in c.stages for c in chains)
                    if other != stage
                ]
                for stage in range(len(runs))
            ],
        )

    def enlarge(self, preference: Preference) -> Preference:
        """Scale a preference for the small setting up to the big one."""
        limits = []
        for place in self._places:
            lower = int(place)
            upper = min(lower + 1, len(preference.limits) - 1)
            low, high = preference.limits[lower], preference.limits[upper]
            between = low + (high - low) * (place - lower)
            limits.append(max(1, round(between / self._shrink)))
        return Preference(tuple(limits), preference.wait_share, preference.forward_first)


def likeness(setting: Setting) -> Likeness | None:
    """Scale a big setting down; None for one that is small itself."""
    return Likeness(setting) if setting.n_ranks > _N_RANKS else None
