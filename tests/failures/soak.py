"""Trains for a long time while everything changes: `python tests/failures/soak.py --minutes 20`.

Schedules are swapped, batches change their length, errors of every kind are injected and recovered from; gradients are
compared with the unpipelined model's. At the end memory, descriptors and threads must be what they were after the first
tenth of the time.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import search_path  # noqa: F401 - with it the other helpers are found

# isort: split
import campaign
from campaign_cases import WIDTH, Case, draw
from campaign_faults import TIMEOUT, linked
from campaign_judge import judge
from rank_pool import RankPool

SIZE = 4
CHUNK = 25
_MIB_OF_CHANCE = 4  # an allocator that keeps a little more now and then; 1 KiB a schedule would be more in 20 minutes


def soak(rank: int, size: int, group: Any, cases: list[Case]) -> tuple[list[campaign.Seen], dict[str, float]]:
    """Some steps with batches of any length before each case's fault; then what this process holds."""
    import gc

    import torch

    seen = []
    for case in cases:
        lengths = random.Random(case.seed)
        trial = campaign.Trial(case, rank, group)
        with linked(case.link), trial.schedule(TIMEOUT, None) as schedule:
            for _ in range(8):
                rows = lengths.randint(case.n_microbatches, 4 * case.n_microbatches)
                x = torch.randn(rows, WIDTH, dtype=torch.float64)
                schedule.step(x, target=x)
                schedule.eval(x)
        seen += campaign.run_cases(rank, size, group, [case])
    gc.collect()
    with open("/proc/self/status") as status:
        memory = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    held = {
        "MiB": memory / 1024,
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(len(os.listdir("/proc/self/task"))),
    }
    return seen, held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--link", choices=["shm", "c10d"], default="shm")
    options = parser.parse_args()
    pool = RankPool(SIZE)
    start, seed, found, first = time.monotonic(), options.seed, [], None
    history: list[list[dict[str, float]]] = []
    while time.monotonic() - start < 60 * options.minutes:
        cases: list[Case] = []
        while len(cases) < CHUNK:
            case = draw(seed, options.link, without=("late", "stop", "kill"))
            seed += 1
            if case.n_ranks == SIZE:
                cases.append(case)
        results = pool.run(SIZE, soak, cases, timeout=600.0)
        for case, *seen in zip(cases, *(seen for seen, _ in results), strict=True):
            found += judge(case, seen)
        history.append([held for _, held in results])
        minutes = (time.monotonic() - start) / 60
        worst = {name: max(held[name] for held in history[-1]) for name in history[-1][0]}
        told = ", ".join(f"{value:.0f} {name}" for name, value in worst.items())
        print(f"{minutes:5.1f} min: {len(history) * CHUNK} faults, {len(found)} wrong; {told}", flush=True)
        if first is None and minutes > options.minutes / 10:
            first = history[-1]
    pool.close()
    print("\n\n".join(found), end="\n" * bool(found))
    first = first or history[0]
    grew = [
        f"rank {rank}: {name} {before[name]:.0f} -> {after[name]:.0f}"
        for rank, (before, after) in enumerate(zip(first, history[-1], strict=True))
        for name in before
        if after[name] > before[name] + (_MIB_OF_CHANCE if name == "MiB" else 0)
    ]
    ends = ", ".join(
        f"{max(held[name] for held in first):.0f} -> {max(held[name] for held in history[-1]):.0f} {name}"
        for name in first[0]
    )
    faults = len(history) * CHUNK
    print(f"{faults} faults over {options.link}, {faults - len(found)} recovered from; at most {ends} a rank", end="; ")
    print("GREW: " + "; ".join(grew) if grew else "flat")
    return int(bool(found or grew))


if __name__ == "__main__":
    sys.exit(main())
