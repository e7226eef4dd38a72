"""How close each schedule's step comes to its own simulated time. What an action costs the host: schedules_host.py.

    python benchmarks/schedules.py [--json] [--quick] [--rounds N] [--contenders NAME ...]

P = 4 ranks, M = 16, stages that sleep 5 ms for a rank's share of a microbatch in each of forward,
input gradient and weight gradient. The simulated time is that of the program with the stages' own mean times,
measured inside them in the same turn. torch's class of the same name, where it has one, runs the same stages.
Figures are medians over the rounds (smallest-largest).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from contenders import PACKAGES
from ranks import Span, elapsed, run_ranks, take_turns
from report import Table, environment, options, ratios, show, spread, summary
from split_stages import PARTS, SplitSleepStage
from torch import Tensor, nn

from pypipe.program import Program, build, simulate

P, M, SECONDS = 4, 16, 0.005


@dataclass(frozen=True)
class Entry:
    """A schedule under test; `torch` is the name of its class there, "" where there is none."""

    name: str
    pypipe: str
    torch: str = ""
    build: dict[str, int] = field(default_factory=dict)


_TWO = {"stages_per_rank": 2}
ENTRIES = [
    Entry("gpipe", "ScheduleGPipe", "ScheduleGPipe"),
    Entry("1f1b", "Schedule1F1B", "Schedule1F1B"),
    Entry("interleaved", "ScheduleInterleaved1F1B", "ScheduleInterleaved1F1B", _TWO),
    Entry("looped_bfs", "ScheduleLoopedBFS", "ScheduleLoopedBFS", _TWO),
    Entry("interleaved_zb", "ScheduleInterleavedZeroBubble", "ScheduleInterleavedZeroBubble", _TWO),
    Entry("zb_h1", "ScheduleZBH1"),
    Entry("zb_h2", "ScheduleZBH2"),
    Entry("zbv", "ScheduleZBVZeroBubble", "ScheduleZBVZeroBubble"),
    Entry("v_half", "ScheduleVHalf"),
    Entry("v_min", "ScheduleVMin"),
    Entry("dualpipe", "ScheduleDualPipe"),
    Entry("dualpipev", "ScheduleDualPipeV", "ScheduleDualPipeV"),
]
ROWS = {
    f"{package} {entry.name}": (package, entry) for entry in ENTRIES for package in PACKAGES if getattr(entry, package)
}


def first_element(output: Tensor, target: Tensor) -> Tensor:
    """A loss that costs nothing."""
    return output.flatten()[0] + 0 * target.sum()


class Running:
    """One row's schedule on this rank, and its stages by their number in the program."""

    def __init__(
        self, package: str, entry: Entry, rank: int, program: Program, modules: dict[int, nn.Module], m: int
    ) -> None:
        home = importlib.import_module(PACKAGES[package])
        count = len(program.chains[0].stages)
        self.modules = modules
        stages = [
            home.PipelineStage(module, program.piece_of(number), count, torch.device("cpu"))
            for number, module in modules.items()
        ]
        alone = package == "torch" and len(stages) == 1
        self.schedule = getattr(home, getattr(entry, package))(
            stages[0] if alone else stages, n_microbatches=m, loss_fn=first_element
        )
        self.copies = len(program.chains)
        self.takes_input = any(program.previous_stage(number) is None for number in modules)
        self.takes_target = any(program.next_stage(number) is None for number in modules)

    def step(self, x: Tensor, y: Tensor) -> None:
        for module in self.modules.values():
            module.zero_grad()
        if self.copies > 1:  # of which no one has the whole gradient of the batch: pypipe refuses it
            x = x.detach()
        arguments = (x,) if self.takes_input else ()
        if self.takes_target:
            self.schedule.step(*arguments, target=y, losses=[], return_outputs=False)
        else:
            self.schedule.step(*arguments, return_outputs=False)

    def close(self) -> None:
        if hasattr(self.schedule, "close"):
            self.schedule.close()


def sleeping_rank(
    rank: int, n_ranks: int, rows: Sequence[str], rounds: int, count: int
) -> dict[str, list[tuple[Span, dict[int, dict[str, float]]]]]:
    """For each row and turn, this rank's span and its stages' mean times."""
    samples: dict[str, list[tuple[Span, dict[int, dict[str, float]]]]] = {row: [] for row in rows}
    # The first stage, too, has a gradient of its input to compute, as a model's first layers would.
    x, y = torch.randn(M, 16, requires_grad=True), torch.zeros(M)
    running = {}
    for row in rows:
        package, entry = ROWS[row]
        program = build(entry.name, n_ranks, M, **entry.build)
        share = SECONDS * n_ranks / len(program.chains[0].stages)
        held = [number for number, holder in enumerate(program.placement) if holder == rank]
        modules = {number: SplitSleepStage(share) for number in held}
        running[row] = Running(package, entry, rank, program, dict(modules), M)
        running[row].step(x, y)
    steps = {row: partial(running[row].step, x, y) for row in rows}
    for each in running.values():
        for module in each.modules.values():
            module.reset()  # type: ignore[operator]
    for row, span in take_turns(steps, rounds, count):
        means = {}
        for number, module in running[row].modules.items():
            assert isinstance(module, SplitSleepStage)
            means[number] = {part: module.mean(part) for part in PARTS}
            module.reset()
        samples[row].append((span, means))
    for each in running.values():
        each.close()
    return samples


def measure_sleeping(rows: Sequence[str], rounds: int, count: int) -> list[dict[str, Any]]:
    """A result for each row."""
    timeout = 120 + 3 * len(rows) * (1 + rounds * count)
    ranks = run_ranks(sleeping_rank, P, rows, rounds, count, timeout=timeout)
    results: list[dict[str, Any]] = []
    steps: dict[str, list[float]] = {}
    simulated: dict[str, list[float]] = {}
    for row in rows:
        _, entry = ROWS[row]
        program = build(entry.name, P, M, **entry.build)
        steps[row], simulated[row] = [], []
        for turn in zip(*(samples[row] for samples in ranks), strict=True):
            steps[row].append(elapsed(span for span, _ in turn) / count)
            means = {number: mean for _, of_rank in turn for number, mean in of_rank.items()}
            costs: dict[str, Any] = {
                part: [means[number][part] for number in range(program.n_stages)] for part in PARTS
            }
            whole = [a + b for a, b in zip(costs["input_backward"], costs["weight_backward"], strict=True)]
            simulated[row].append(simulate(program, backward=whole, **costs).step_time)
        results.append(
            {
                "contender": row,
                "step_milliseconds": summary(steps[row], 1e3),
                "simulated_milliseconds": summary(simulated[row], 1e3),
                "over_simulated": ratios(steps[row], simulated[row]),
            }
        )
    if "pypipe 1f1b" in steps:
        for row, result in zip(rows, results, strict=True):
            result["over_1f1b"] = ratios(steps[row], steps["pypipe 1f1b"])
            result["simulated_over_1f1b"] = ratios(simulated[row], simulated["pypipe 1f1b"])
    return results


def tables(result: dict[str, Any]) -> list[Table]:
    sleeping = [
        [
            row["contender"],
            spread(row["step_milliseconds"], 1),
            spread(row["simulated_milliseconds"], 1),
            spread(row["over_simulated"], 3),
            spread(row["over_1f1b"], 3) if "over_1f1b" in row else "-",
            f"{row['simulated_over_1f1b']['median']:.3f}" if "over_1f1b" in row else "-",
        ]
        for row in result["sleeping"]
    ]
    return [
        (
            f"Sleeping stages, P={P}, M={M}, {SECONDS * 1e3:g} ms each of F, I, W",
            ["contender", "step, ms", "simulated, ms", "step / simulated", "step / 1f1b's", "as simulated"],
            sleeping,
        ),
    ]


def main() -> None:
    chosen = options("Step over simulated time of every schedule.", list(ROWS))
    result = {
        "benchmark": "schedules",
        "environment": environment(),
        "rounds": chosen.rounds,
        "sleeping": measure_sleeping(chosen.contenders, chosen.rounds, count=1 if chosen.quick else 2),
    }
    show(result, tables(result), chosen.json)


if __name__ == "__main__":
    main()
