"""How close a pipeline's step comes to the ideal, and what a microbatch costs the host.

    python benchmarks/step.py [--json] [--quick] [--rounds N] [--contenders NAME ...]

Part one: P = 4 ranks, M = 16, stages that sleep, small and large boundaries. The ideal is (M + P - 1)
times the largest over ranks of the stages' own mean forward + backward, measured inside them in the same
turn. Part two: stages that compute next to nothing, beside plain autograd over the same microbatches. The
contenders take turns in the same processes; handwired.py is the floor. Figures are medians over the
rounds (smallest-largest).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from contenders import LossFunction, Pipeline, make_pipeline
from handwired import Boundary, make_boundaries
from ranks import Span, context, elapsed, run_ranks, take_turns
from report import Table, environment, options, ratios, show, spread, summary
from stages import BACKWARD_SECONDS, FORWARD_SECONDS, SleepStage, free_loss, tiny_stage
from torch import Tensor, nn

CONTENDERS = ["pypipe", "torch", "handwired"]
SLEEP_P, SLEEP_M = 4, 16
BOUNDARY_BYTES = [16 << 10, 4 << 20]
HOST_M = 64  # so many that at P = 2 fill and drain weigh little
WIDTH = 16


@contextmanager
def pipelines(
    modules: Mapping[str, nn.Module],
    rank: int,
    P: int,
    M: int,
    loss_fn: LossFunction,
    boundaries: list[Boundary],
    x: Tensor,
    y: Tensor,
) -> Iterator[dict[str, Pipeline]]:
    """One pipeline per contender, warmed up by one step, whose gradients must agree."""
    opened: dict[str, Pipeline] = {}
    try:
        for name, module in modules.items():
            opened[name] = make_pipeline(name, module, rank, P, M, loss_fn, boundaries)
            opened[name].step(x, y)
        # At P > 1 bare autograd runs one stage only, so its gradients are another model's.
        reference, *others = [name for name in modules if name != "bare" or P == 1]
        for name in others:
            for expected, actual in zip(modules[reference].parameters(), modules[name].parameters(), strict=True):
                torch.testing.assert_close(
                    actual.grad, expected.grad, msg=f"rank {rank}: gradients of {name} and {reference} differ"
                )
        yield opened
    finally:
        for pipeline in opened.values():
            pipeline.close()


def training_step(module: nn.Module, pipeline: Pipeline, x: Tensor, y: Tensor) -> None:
    module.zero_grad()
    pipeline.step(x, y)


def sleeping_rank(
    rank: int, P: int, names: Sequence[str], boundaries: Mapping[int, list[Boundary]], rounds: int, count: int
) -> dict[int, dict[str, list[tuple[Span, float]]]]:
    """Per boundary size and contender, each turn's span on this rank and its stage's seconds a microbatch."""
    samples: dict[int, dict[str, list[tuple[Span, float]]]] = {}
    for size in BOUNDARY_BYTES:
        samples[size] = {name: [] for name in names}
        x, y = torch.randn(SLEEP_M, size // 4), torch.zeros(SLEEP_M)
        stages = {name: SleepStage() for name in names}
        with pipelines(stages, rank, P, SLEEP_M, free_loss, boundaries[size], x, y) as opened:
            steps = {name: partial(training_step, stages[name], opened[name], x, y) for name in names}
            for stage in stages.values():
                stage.seconds = 0.0
            for name, span in take_turns(steps, rounds, count):
                samples[size][name].append((span, stages[name].seconds / (count * SLEEP_M)))
                stages[name].seconds = 0.0
    return samples


def host_rank(
    rank: int, P: int, names: Sequence[str], boundaries: list[Boundary], rounds: int, count: int
) -> dict[str, list[Span]]:
    """Per contender, each turn's span on this rank."""
    samples: dict[str, list[Span]] = {name: [] for name in names}
    torch.manual_seed(0)
    x, y = torch.randn(HOST_M, WIDTH), torch.randn(HOST_M, WIDTH)
    weights = tiny_stage(WIDTH).state_dict()
    stages = {name: tiny_stage(WIDTH) for name in names}
    for stage in stages.values():
        stage.load_state_dict(weights)
    with pipelines(stages, rank, P, HOST_M, nn.functional.mse_loss, boundaries, x, y) as opened:
        steps = {name: partial(training_step, stages[name], opened[name], x, y) for name in names}
        for name, span in take_turns(steps, rounds, count):
            samples[name].append(span)
    return samples


def measure_sleeping(names: Sequence[str], rounds: int, count: int) -> list[dict[str, Any]]:
    """Part one, a row for each boundary size and contender."""
    P, M = SLEEP_P, SLEEP_M
    boundaries = {size: make_boundaries(context, P, M, (1, size // 4)) for size in BOUNDARY_BYTES}
    ideal = (M + P - 1) * (FORWARD_SECONDS + BACKWARD_SECONDS)
    turns = len(BOUNDARY_BYTES) * len(names) * (1 + rounds * count)
    ranks = run_ranks(sleeping_rank, P, names, boundaries, rounds, count, timeout=120 + 5 * ideal * turns)
    rows = []
    for size in BOUNDARY_BYTES:
        turn = {name: list(zip(*(samples[size][name] for samples in ranks), strict=True)) for name in names}
        step = {name: [elapsed(span for span, _ in each) / count for each in turn[name]] for name in names}
        for name in names:
            stage = [max(seconds for _, seconds in each) for each in turn[name]]
            row = {
                "boundary_bytes": size,
                "contender": name,
                "step_milliseconds": summary(step[name], 1e3),
                "stage_milliseconds": summary(stage, 1e3),
                "over_ideal": ratios(step[name], [(M + P - 1) * seconds for seconds in stage]),
            }
            if "handwired" in names:
                row["over_handwired"] = ratios(step[name], step["handwired"])
            rows.append(row)
    return rows


def measure_host(P: int, names: Sequence[str], rounds: int, count: int) -> list[dict[str, Any]]:
    """Part two, a row for each contender: wall time per microbatch, its F and B together."""
    boundaries = make_boundaries(context, P, HOST_M, (1, WIDTH))
    names = ["bare", *names]
    ranks = run_ranks(host_rank, P, names, boundaries, rounds, count, timeout=300)
    seconds = {
        name: [elapsed(spans) / (count * HOST_M) for spans in zip(*(each[name] for each in ranks), strict=True)]
        for name in names
    }
    return [
        {
            "P": P,
            "contender": name,
            "microseconds_per_microbatch": summary(seconds[name], 1e6),
            "over_bare": ratios(seconds[name], seconds["bare"]),
        }
        for name in names
    ]


def tables(result: dict[str, Any]) -> list[Table]:
    sleeping = [
        [
            f"{row['boundary_bytes'] >> 10} KiB",
            row["contender"],
            spread(row["step_milliseconds"], 1),
            spread(row["stage_milliseconds"], 2),
            spread(row["over_ideal"], 3),
            spread(row["over_handwired"], 3) if "over_handwired" in row else "-",
        ]
        for row in result["sleeping"]["results"]
    ]
    host = [
        [
            str(row["P"]),
            row["contender"],
            spread(row["microseconds_per_microbatch"], 1),
            spread(row["over_bare"], 2),
        ]
        for row in result["host"]["results"]
    ]
    return [
        (
            f"Sleeping stages, P={SLEEP_P}, M={SLEEP_M}",
            ["boundary", "contender", "step, ms", "stage F+B, ms", "step / ideal", "step / handwired"],
            sleeping,
        ),
        (f"Host cost, M={HOST_M}", ["P", "contender", "µs per microbatch", "over bare autograd"], host),
    ]


def main() -> None:
    chosen = options("Step over ideal, and the host's cost per microbatch.", CONTENDERS)
    names, rounds = chosen.contenders, chosen.rounds
    count = 5 if chosen.quick else 40
    result = {
        "benchmark": "step",
        "environment": environment(),
        "rounds": rounds,
        "sleeping": {
            "P": SLEEP_P,
            "M": SLEEP_M,
            "forward_seconds": FORWARD_SECONDS,
            "backward_seconds": BACKWARD_SECONDS,
            "results": measure_sleeping(names, rounds, count=1 if chosen.quick else 3),
        },
        "host": {
            "M": HOST_M,
            "results": [row for P in (1, 2) for row in measure_host(P, names, rounds, count)],
        },
    }
    show(result, tables(result), chosen.json)


if __name__ == "__main__":
    main()
