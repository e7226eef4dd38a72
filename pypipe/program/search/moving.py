"""Improvement by moves: actions on the critical path go before what holds them up, while that helps."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from pypipe.program.search.listing import Scheduled
from pypipe.program.search.setting import Lists, Setting

_HEAT = 5e-5  # at first, a move that makes the score worse by this share of it is kept with a chance of 1 in e


@dataclass(frozen=True, slots=True)
class _Timed:
    """When each action runs, by its number; and when each rank ends."""

    starts: list[float]
    ends: list[float]
    free: list[float]


def improve(setting: Setting, scheduled: Scheduled, n_moves: int, seed: int = 0) -> Scheduled:
    """Try moves, keep those that help, and a few that do not at first (simulated annealing).

    A move takes one action of a critical path some places earlier in its rank's list, or an action behind it before
    it. The path is that of the rank whose span is longest, of the last rank to end, or of any rank.

    Args:
        setting: what `scheduled` was made for.
        scheduled: where to start.
        n_moves: moves to try.
        seed: fixes the choices.

    Returns:
        The best that was met.
    """
    return _Moving(setting, scheduled.lists, seed).run(scheduled, n_moves)


def time_lists(setting: Setting, lists: Lists) -> Scheduled | None:
    """Lists with their step time and span; None where the ranks would wait for each other for ever."""
    moving = _Moving(setting, lists, 0)
    timed = moving.time()
    return None if timed is None else Scheduled(*moving.totals(timed), lists)


class _Moving:
    def __init__(self, setting: Setting, lists: Lists, seed: int) -> None:
        self.setting = setting
        self.random = random.Random(seed)
        self.lists = [list(numbers) for numbers in lists]
        n_microbatches = setting.n_microbatches
        size = setting.n_stages * n_microbatches
        count = 3 * size
        self.rank_of = [setting.placement[number % size // n_microbatches] for number in range(count)]
        # For each action: its duration, the action whose result it needs (or -1), and how long that travels.
        self.durations = [setting.durations[n // size][n % size // n_microbatches] for n in range(count)]
        self.needed, self.delays = [-1] * count, [0.0] * count
        for place in range(size):
            stage, microbatch = divmod(place, n_microbatches)
            before, after = setting.before[stage], setting.after[stage]
            if before >= 0:
                self.needed[place] = before * n_microbatches + microbatch
                self.delays[place] = setting.delays[before]
            self.needed[size + place] = place
            if after >= 0:
                self.needed[size + place] = size + after * n_microbatches + microbatch
                self.delays[size + place] = setting.delays[stage]
            self.needed[2 * size + place] = size + place
        self.size = size

    def run(self, found: Scheduled, n_moves: int) -> Scheduled:
        timed = self.time()
        if timed is None:
            return found
        current = best = self._score(timed)
        for move in range(n_moves):
            heat = _HEAT * best * (1 - move / n_moves)
            proposed = self._propose(timed)
            if proposed is None:
                continue
            rank, changed = proposed
            kept, self.lists[rank] = self.lists[rank], changed
            tried = self.time()
            score = math.inf if tried is None else self._score(tried)
            if tried is None or (score > current and self.random.random() >= math.exp((current - score) / heat)):
                self.lists[rank] = kept
                continue
            timed, current = tried, score
            if score < best:
                best = score
                found = Scheduled(*self.totals(timed), [list(numbers) for numbers in self.lists])
        return found

    def totals(self, timed: _Timed) -> tuple[float, float]:
        spans = [end - timed.starts[numbers[0]] for end, numbers in zip(timed.free, self.lists, strict=True) if numbers]
        return max(timed.free), max(spans)

    def _score(self, timed: _Timed) -> float:
        # A little of all ranks' ends leads the way where the longest does not change.
        step_time, span = self.totals(timed)
        return step_time + span + 0.02 * sum(timed.free) / len(timed.free)

    def time(self) -> _Timed | None:
        """When each action runs; None where the ranks would wait for each other for ever."""
        # Each move comes through here, so this loop is its own instead of a `walk`.
        needed, delays, durations, lists = self.needed, self.delays, self.durations, self.lists
        starts, ends = [0.0] * len(needed), [-1.0] * len(needed)
        free, reached = [0.0] * len(lists), [0] * len(lists)
        waiting: dict[int, int] = {}
        runnable = list(range(len(lists)))
        while runnable:
            rank = runnable.pop()
            numbers, clock = lists[rank], free[rank]
            for position in range(reached[rank], len(numbers)):
                number = numbers[position]
                source = needed[number]
                if source >= 0:
                    made = ends[source]
                    if made < 0:
                        waiting[source] = rank
                        reached[rank] = position
                        break
                    made += delays[number]
                    if made > clock:
                        clock = made
                starts[number] = clock
                clock += durations[number]
                ends[number] = clock
                if number in waiting:
                    runnable.append(waiting.pop(number))
            else:
                reached[rank] = len(numbers)
            free[rank] = clock
        return None if waiting else _Timed(starts, ends, free)

    def _propose(self, timed: _Timed) -> tuple[int, list[int]] | None:
        """A rank and its changed list; None where the drawn move is impossible."""
        path = self._critical_path(timed, self._end_to_look_at(timed))
        rank, position = path[self.random.randrange(len(path))]
        numbers = self.lists[rank]
        if self.random.random() < 0.6:
            first, last = max(0, position - 1 - int(self.random.random() ** 2 * 4)), position
        else:
            first, last = position, min(len(numbers) - 1, position + 1 + int(self.random.random() ** 2 * 12))
        moved, passed = numbers[last], numbers[first:last]
        group = moved // self.setting.n_microbatches  # actions of one kind and stage stay in order of microbatches
        if not passed or self.needed[moved] in passed or any(n // self.setting.n_microbatches == group for n in passed):
            return None
        changed = [*numbers[:first], moved, *passed, *numbers[last + 1 :]]
        if moved < self.size and not self._fits(rank, changed):
            return None
        return rank, changed

    def _end_to_look_at(self, timed: _Timed) -> int:
        ranks = [rank for rank, numbers in enumerate(self.lists) if numbers]
        draw = self.random.random()
        if draw < 0.4:
            return max(ranks, key=lambda rank: timed.free[rank] - timed.starts[self.lists[rank][0]])
        if draw < 0.6:
            return max(ranks, key=lambda rank: timed.free[rank])
        return ranks[self.random.randrange(len(ranks))]

    def _critical_path(self, timed: _Timed, rank: int) -> list[tuple[int, int]]:
        """Ranks and positions of a chain of actions without a pause that ends with a rank's last one."""
        starts, ends = timed.starts, timed.ends
        numbers = self.lists[rank]
        position = len(numbers) - 1
        path = [(rank, position)]
        while True:
            number = numbers[position]
            source = self.needed[number]
            if position > 0 and ends[numbers[position - 1]] >= starts[number]:
                position -= 1
            elif source >= 0:
                rank = self.rank_of[source]
                numbers = self.lists[rank]
                position = numbers.index(source)
            else:
                return path
            path.append((rank, position))

    def _fits(self, rank: int, numbers: list[int]) -> bool:
        setting, size = self.setting, self.size
        alive, most = 0.0, setting.memory[rank] * (1 + 1e-9)
        for number in numbers:
            if number < size:
                alive += setting.activation[number // setting.n_microbatches]
                if alive > most:
                    return False
            elif number >= 2 * size:
                alive -= setting.activation[(number - 2 * size) // setting.n_microbatches]
        return True
