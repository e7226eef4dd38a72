"""Runs cases of the fault campaign on pools of ranks."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import campaign
import cuda_emulator
from campaign_cases import Case, draw
from campaign_judge import judge
from rank_pool import Raised, RankPool

_AT_ONCE = 40


class Runner:
    """Runs the cases of one link.

    Args:
        link: the link.
        pool: ranks that do what they are told, and live on.
        environment: of the ranks that are killed; each such case gets new ones.
    """

    def __init__(self, link: str, pool: RankPool, environment: dict[str, str]) -> None:
        self.link = link
        self.kinds: Counter[str] = Counter()
        """How many cases there were of each kind of fault."""
        self._pool = pool
        self._environment = environment

    def run(self, first: int, count: int) -> list[str]:
        """Runs the cases of these seeds; returns what was wrong."""
        found: list[str] = []
        by_size: dict[int, list[Case]] = defaultdict(list)
        for seed in range(first, first + count):
            case = draw(seed, self.link)
            self.kinds[case.fault] += 1
            if case.fault == "kill":
                found += self._kill(case)
            else:
                by_size[case.n_ranks].append(case)
        for size, cases in by_size.items():
            for start in range(0, len(cases), _AT_ONCE):
                found += self._run(size, cases[start : start + _AT_ONCE])
        return found

    def _run(self, size: int, cases: Sequence[Case]) -> list[str]:
        try:
            results = self._pool.run(size, campaign.run_cases, cases, timeout=60.0 + 2 * len(cases))
        except AssertionError as error:
            return [f"{self.link}, seeds {', '.join(str(case.seed) for case in cases)}: {error}"]
        return [text for case, *seen in zip(cases, *results, strict=True) for text in judge(case, seen)]

    def _kill(self, case: Case) -> list[str]:
        # From a server that has imported torch: half a second in place of five.
        pool = RankPool(case.n_ranks, self._environment)
        with contextlib.closing(pool):
            try:
                results: list[Any] = pool.run_raw(case.n_ranks, campaign.run_cases, [case])
            except AssertionError as error:
                return [f"{case}: {error}"]
        raised = {rank: result for rank, result in enumerate(results) if isinstance(result, Raised)}
        died = [rank for rank, result in raised.items() if str(result.error).endswith("died")]
        if list(raised) != [case.culprit] or died != [case.culprit]:
            return [f"{case}: rank {rank}: {result.error}\n{result.text}" for rank, result in raised.items()] or [
                f"{case}: nobody died"
            ]
        return judge(case, [None if rank in raised else result[0] for rank, result in enumerate(results)])


@contextlib.contextmanager
def runner(link: str, pool: RankPool | None = None) -> Iterator[Runner]:
    """The runner of a link; without `pool`, and over NCCL anyway, with ranks of its own."""
    environment = {}
    if link == "nccl":
        emulator = cuda_emulator.build()
        environment = {
            "PYPIPE_CUDA_LIBRARY": str(emulator.cuda),
            "PYPIPE_NCCL_LIBRARY": str(emulator.nccl),
            "PYPIPE_EMULATOR_DELAY_US": "100",
        }
    if pool is not None and link != "nccl":
        yield Runner(link, pool, environment)
        return
    with contextlib.closing(RankPool(4, environment)) as own:
        yield Runner(link, own, environment)
