"""What an action costs the host, above plain autograd, in every schedule.

    python benchmarks/schedules_host.py [--json] [--quick] [--rounds N] [--contenders NAME ...]

One rank, a 16x16 linear layer as each stage, M = 64: what a step takes beyond the same layers in one model and a loop
of forward, loss and backward, for each compute action. The clock is the thread's CPU time: all of a step runs in one
thread here, and what else the machine does counts less than on the wall. Figures are medians over the rounds
(smallest-largest), of the difference within each round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from contenders import BarePipeline
from ranks import run_ranks
from report import environment, options, show, spread, summary
from schedules import ROWS, Running, first_element
from stages import tiny_stage
from torch import nn

from pypipe.program import build

WIDTH, M = 16, 64


def host_rank(
    rank: int, n_ranks: int, rows: Sequence[str], rounds: int, count: int
) -> dict[str, tuple[int, list[float]]]:
    """For each row, its compute actions a step, and each turn's seconds a step; rows that are bare come with it."""
    x, y = torch.randn(M, WIDTH), torch.randn(M, WIDTH)
    steps: dict[str, Any] = {}
    actions: dict[str, int] = {}
    running = []
    for row in rows:
        package, entry = ROWS[row]
        program = build(entry.name, 1, M, **entry.build)
        modules = {number: tiny_stage(WIDTH) for number in range(program.n_stages)}
        running.append(Running(package, entry, rank, program, modules, M))
        steps[row] = partial(running[-1].step, x, y)
        actions[row] = sum(action.kind.is_compute for action in program.compute_only().ranks[0])
        bare = f"bare {program.n_stages}"
        if bare not in steps:
            model = nn.Sequential(*(tiny_stage(WIDTH) for _ in modules))
            steps[bare] = partial(BarePipeline(model, M, first_element).step, x, y)
            actions[bare] = 0
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {row: [] for row in steps}
    for _ in range(rounds):
        for row, step in steps.items():
            start = time.thread_time()
            for _ in range(count):
                step()
            seconds[row].append((time.thread_time() - start) / count)
    for each in running:
        each.close()
    return {row: (actions[row], seconds[row]) for row in steps}


def measure(rows: Sequence[str], rounds: int, count: int) -> list[dict[str, Any]]:
    """A result for each row that runs on one rank."""
    rows = [row for row in rows if ROWS[row][1].name != "dualpipe"]  # takes two ranks
    (measured,) = run_ranks(host_rank, 1, rows, rounds, count, timeout=300)
    results = []
    for row in rows:
        _, entry = ROWS[row]
        actions, step = measured[row]
        bare = measured[f"bare {build(entry.name, 1, M, **entry.build).n_stages}"][1]
        above = [(a - b) / actions for a, b in zip(step, bare, strict=True)]
        results.append({"contender": row, "actions": actions, "microseconds_per_action": summary(above, 1e6)})
    return results


def main() -> None:
    chosen = options("What an action costs the host in every schedule.", list(ROWS))
    result = {
        "benchmark": "schedules_host",
        "environment": environment(),
        "rounds": chosen.rounds,
        "host": measure(chosen.contenders, chosen.rounds, count=1 if chosen.quick else 3),
    }
    rows = [[r["contender"], str(r["actions"]), spread(r["microseconds_per_action"], 1)] for r in result["host"]]
    title = f"Host cost above plain autograd, P=1, M={M}"
    show(result, [(title, ["contender", "actions a step", "µs per action"], rows)], chosen.json)


if __name__ == "__main__":
    main()
