"""What an action costs the host, above the module's own, in every schedule.

    python benchmarks/schedules_host.py [--json] [--quick] [--rounds N] [--contenders NAME ...]

One rank, a 16x16 linear layer as each stage, M = 64: what a step takes for each compute action, beyond

- the stages by hand: a loop that calls each stage's forward, and autograd's engine for its backward or for each half
  of it, and nothing else: what the schedule's actions cost the modules themselves;
- one model: the same layers in one model, and a loop of forward, loss and backward. Where backwards are split or a
  rank has two stages, the actions are more runs of autograd's engine than that.

The clock is the thread's CPU time: all of a step runs in one thread here, and what else the machine does counts less
than on the wall. Figures are medians over the rounds (smallest-largest), of the difference within each round.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from contenders import BarePipeline, StagesByHand
from ranks import run_ranks
from report import environment, options, show, spread, summary
from schedules import ROWS, Running, first_element
from stages import tiny_stage
from torch import nn

from pypipe.program import Kind, build

WIDTH, M = 16, 64
BASES = {"by_hand": "the stages by hand", "one_model": "one model"}


@dataclass
class Measured:
    """Seconds of a step, in each turn.

    Attributes:
        actions: compute actions of a step.
        step: the schedule's.
        bases: each of BASES's.
    """

    actions: int
    step: list[float]
    bases: dict[str, list[float]]


def host_rank(rank: int, n_ranks: int, rows: Sequence[str], rounds: int, count: int) -> dict[str, Measured]:
    """Each row, measured."""
    x, y = torch.randn(M, WIDTH), torch.randn(M, WIDTH)
    steps: dict[object, Any] = {}  # rows share their bases
    measured: dict[str, Measured] = {}
    seconds: defaultdict[object, list[float]] = defaultdict(list)
    running = []
    for row in rows:
        package, entry = ROWS[row]
        program = build(entry.name, 1, M, **entry.build)
        actions = [action for action in program.compute_only().ranks[0] if action.kind.is_compute]

        def stages(n_stages: int = program.n_stages) -> list[nn.Module]:
            return [tiny_stage(WIDTH) for _ in range(n_stages)]

        running.append(Running(package, entry, rank, program, dict(enumerate(stages())), M))
        steps[row] = partial(running[-1].step, x, y)
        halves = frozenset((action.stage, action.microbatch) for action in actions if action.kind is Kind.I)
        by_hand, one_model = (program.n_stages, halves), program.n_stages
        if by_hand not in steps:
            steps[by_hand] = partial(StagesByHand(stages(), M, first_element, halves).step, x, y)
        if one_model not in steps:
            steps[one_model] = partial(BarePipeline(nn.Sequential(*stages()), M, first_element).step, x, y)
        bases = {"by_hand": seconds[by_hand], "one_model": seconds[one_model]}
        measured[row] = Measured(len(actions), seconds[row], bases)
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.thread_time()
            for _ in range(count):
                step()
            seconds[name].append((time.thread_time() - start) / count)
    for each in running:
        each.close()
    return measured


def measure(rows: Sequence[str], rounds: int, count: int) -> list[dict[str, Any]]:
    """A result for each row that runs on one rank."""
    rows = [row for row in rows if ROWS[row][1].name != "dualpipe"]  # takes two ranks
    (measured,) = run_ranks(host_rank, 1, rows, rounds, count, timeout=300)
    results = []
    for row, of_row in measured.items():
        result: dict[str, Any] = {"contender": row, "actions": of_row.actions}
        for base, seconds in of_row.bases.items():
            above = [(a - b) / of_row.actions for a, b in zip(of_row.step, seconds, strict=True)]
            result[f"microseconds_above_{base}"] = summary(above, 1e6)
        results.append(result)
    return results


def main() -> None:
    chosen = options("What an action costs the host in every schedule.", list(ROWS))
    result = {
        "benchmark": "schedules_host",
        "environment": environment(),
        "rounds": chosen.rounds,
        "host": measure(chosen.contenders, chosen.rounds, count=1 if chosen.quick else 3),
    }
    rows = [
        [r["contender"], str(r["actions"]), *(spread(r[f"microseconds_above_{base}"], 1) for base in BASES)]
        for r in result["host"]
    ]
    headings = ["contender", "actions a step", *(f"µs per action above {base}" for base in BASES.values())]
    show(result, [(f"Host cost, P=1, M={M}", headings, rows)], chosen.json)


if __name__ == "__main__":
    main()
