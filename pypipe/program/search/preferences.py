"""The search: which preference of the list scheduler makes the best program, and whether moves improve that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from pypipe.program.search.listing import Preference, Scheduled, schedule
from pypipe.program.search.moving import improve, time_lists
from pypipe.program.search.scaling import likeness
from pypipe.program.search.setting import Lists, Setting

_MOST_TRIES = 2500  # a small problem is searched out long before its share of actions is used up
_STARTS = 6  # preferences that are refined
_WAIT_SHARES = (0.0, 0.25, 0.5, 1.0)


def search(setting: Setting, n_actions: int, starts: Iterable[Lists] = ()) -> list[Scheduled]:
    """Find good lists, and return the best first; the same for the same arguments.

    First a grid over a few numbers that stand for a preference (how many microbatches may be in flight, and how that
    falls from the first to the last stage; wait_share; which goes first), then these numbers one by one, then each
    stage's own limit, then moves of single actions.

    Args:
        setting: the problem.
        n_actions: how much to try: the actions of all the lists that are made; 8 lists at least.
        starts: lists that fit into memory, such as those of known schedules, to which moves may be made too.
    """
    searching = _Search(setting, n_actions)
    known = list(filter(None, (time_lists(setting, lists) for lists in starts)))
    if any(scheduled.score <= searching.shortest for scheduled in known):
        return sorted(known, key=lambda scheduled: scheduled.score)
    searching.run()
    pool = sorted([*searching.found.values(), *known], key=lambda scheduled: scheduled.score)[:_STARTS]
    n_moves = 0 if searching.is_done else min(_MOST_TRIES, n_actions // searching.size) // 2
    # A move costs about a third of a list: it only adds up times.
    pool += [improve(setting, scheduled, n_moves) for scheduled in pool[:2] if n_moves >= 10]
    return sorted(pool, key=lambda scheduled: scheduled.score)[:_STARTS]


class _Search:
    def __init__(self, setting: Setting, n_actions: int) -> None:
        self.setting = setting
        self.size = 3 * sum(len(chain.stages) * len(chain.microbatches) for chain in setting.chains)
        self.left = min(_MOST_TRIES, max(8, n_actions // self.size))
        self.scores: dict[Preference, float] = {}
        self.found: dict[Preference, Scheduled] = {}
        step_time, span = setting.shortest()
        self.shortest = (step_time + span) * (1 + 1e-12)
        # Whether each stage is the first of its chain on its rank, and how many stages of the chain follow it.
        self.is_first, self.following = [], []
        for stage, rank in enumerate(setting.placement):
            stages = next(chain.stages for chain in setting.chains if stage in chain.stages)
            self.is_first.append(all(setting.placement[earlier] != rank for earlier in stages if earlier < stage))
            self.following.append(stages[-1] - stage)

    @property
    def is_done(self) -> bool:
        return self.left <= 0 or min(self.scores.values(), default=math.inf) <= self.shortest

    def run(self) -> None:
        grid = list(self._grid())
        if self.left < len(grid) and (like := likeness(self.setting)):
            small = _Search(like.setting, self.left * self.size // 2)
            small.run()
            for preference in sorted(small.scores, key=small.scores.__getitem__)[: max(4, self.left // 2)]:
                self._try(like.enlarge(preference))
        else:
            for preference in grid:
                self._try(preference)
        for preference in sorted(self.scores, key=self.scores.__getitem__):
            if self.is_done:
                break
            self._descend(preference)

    def _best(self) -> list[Preference]:
        return sorted(self.found, key=lambda each: self.found[each].score)[:_STARTS]

    def _try(self, preference: Preference) -> float:
        """Score a preference."""
        score = self.scores.get(preference)
        if score is None:
            if self.is_done:
                return math.inf
            self.left -= 1
            scheduled = schedule(self.setting, preference)
            score = self.scores[preference] = scheduled.score
            self.found[preference] = scheduled
            if len(self.found) > 2 * _STARTS:
                kept = self._best()
                self.found = {preference: self.found[preference] for preference in kept}
        return score

    def _grid(self) -> Iterator[Preference]:
        setting, n_ranks = self.setting, self.setting.n_ranks
        most = max(len(chain.microbatches) for chain in setting.chains)
        for stage, rank in enumerate(setting.placement):
            if setting.activation[stage] * most > setting.memory[rank]:
                most = int(setting.memory[rank] / setting.activation[stage])
        longest = max(len(chain.stages) for chain in setting.chains)
        several = not all(self.is_first)
        first = _ladder(n_ranks // 2, min(most, 3 * n_ranks), 12)
        later = _ladder(n_ranks // 2, min(most, 2 * n_ranks), 6) if several else [most]
        slopes = (longest,) if several else (1, 2, 3, longest)
        for k, l, slope, wait_share, forward_first in product(first, later, slopes, (0.0, 0.5), (True, False)):  # noqa: E741
            yield Preference(self._limits(k, l, slope), wait_share, forward_first)

    def _limits(self, first: int, later: int, slope: int) -> tuple[int, ...]:
        """Each stage's limit: one for ranks' first stages, one for the later, and less towards the chain's end."""
        return tuple(
            min(first if is_first else later, slope * following + 1)
            for is_first, following in zip(self.is_first, self.following, strict=True)
        )

    def _descend(self, preference: Preference) -> None:
        """Change one thing at a time, as long as that helps: all stages' limits at first, then each stage's."""
        n_stages = self.setting.n_stages
        groups: list[Sequence[int]] = [
            [stage for stage in range(n_stages) if self.is_first[stage]],
            [stage for stage in range(n_stages) if not self.is_first[stage]],
            *([stage] for stage in range(n_stages)),
        ]
        score, improved = self._try(preference), True
        while improved and not self.is_done:
            improved = False
            for changed in self._neighbours(preference, groups):
                found = self._try(changed)
                if found < score:
                    preference, score, improved = changed, found, True
                    break

    def _neighbours(self, preference: Preference, groups: Iterable[Sequence[int]]) -> Iterator[Preference]:
        for wait_share in _WAIT_SHARES:
            yield Preference(preference.limits, wait_share, preference.forward_first)
        for group, by in product(groups, (1, -1, 2, -2)):
            limits = list(preference.limits)
            for stage in group:
                limits[stage] = max(1, limits[stage] + by)
            yield Preference(tuple(limits), preference.wait_share, preference.forward_first)


def _ladder(lowest: int, highest: int, steps: int) -> list[int]:
    """Whole numbers from one to another, in steps of the same length."""
    lowest = max(1, min(lowest, highest))
    return sorted({round(lowest + (highest - lowest) * step / (steps - 1)) for step in range(steps)})
