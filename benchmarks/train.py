"""The demo's GPT in training on two processes: tokens per second.

    python benchmarks/train.py [--json] [--quick] [--rounds N] [--contenders NAME ...]

Everybody trains the same model from the same seed on the same batches of real text, 1F1B, one thread a
process; "unpipelined" trains it whole, in one process. The contenders take turns in the same processes.
Figures are medians over the rounds (smallest-largest).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

from contenders import BarePipeline, Pipeline, make_pipeline
from handwired import Boundary, make_boundaries
from ranks import Span, context, elapsed, run_ranks, take_turns
from report import Table, environment, options, ratios, show, spread, summary
from torch import Tensor, nn

CONTENDERS = ["pypipe", "torch", "handwired", "unpipelined"]
P, M = 2, 8
# The demo's defaults, fixed here so that figures from different days compare.
BATCH, CONTEXT, WIDTH, BLOCKS = 32, 64, 64, 4
SEED = 0


class Training:
    """One contender's model in training on this rank; ``losses`` fills up where the last stage is."""

    def __init__(self, pipeline: Pipeline | None, module: nn.Module, tokens: Tensor) -> None:
        from pypipe.commands.demo.model import batches, optimizer_for

        self.pipeline, self.losses = pipeline, list[float]()
        self.optimizer = optimizer_for(module)
        # The same pairs again and again, made beforehand: none of the time is the data's.
        self.batches = itertools.cycle(list(batches(tokens, BATCH, CONTEXT, 16, SEED)))

    def step(self) -> None:
        if self.pipeline is None:  # unpipelined, and another rank's
            return
        x, y = next(self.batches)
        losses = self.pipeline.step(x, y)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if losses:
            self.losses.append(sum(loss.item() for loss in losses) / len(losses))


def train_rank(
    rank: int, _: int, names: Sequence[str], boundaries: list[Boundary], text: str, rounds: int, count: int
) -> tuple[dict[str, list[Span]], dict[str, list[float]]]:
    """Per contender, each turn's span on this rank; and all its losses, where this rank has them."""
    from pypipe.commands.demo.model import Shape, build_stage, encode, loss_of

    tokens, vocabulary = encode(text)
    shape = Shape(vocabulary, CONTEXT, WIDTH, BLOCKS)
    spans: dict[str, list[Span]] = {name: [] for name in names}
    with ExitStack() as opened:
        trainings: dict[str, Training] = {}
        for name in names:
            pipeline: Pipeline | None
            if name == "unpipelined":
                module = build_stage(shape, 0, 1, SEED)
                pipeline = BarePipeline(module, 1, loss_of) if rank == 0 else None
            else:
                module = build_stage(shape, rank, P, SEED)
                pipeline = make_pipeline(name, module, rank, P, M, loss_of, boundaries)
                opened.enter_context(closing(pipeline))
            trainings[name] = Training(pipeline, module, tokens)
            trainings[name].step()  # warms up
        steps: dict[str, Callable[[], object]] = {name: each.step for name, each in trainings.items()}
        for name, span in take_turns(steps, rounds, count):
            spans[name].append(span)
    return spans, {name: each.losses for name, each in trainings.items() if each.losses}


def measure(names: Sequence[str], rounds: int, count: int) -> dict[str, Any]:
    """A row for each contender, and how far their losses are from each other."""
    from pypipe.commands.demo.options import read_text

    boundaries = make_boundaries(context, P, M, (BATCH // M, CONTEXT, WIDTH))
    text = read_text(None, CONTEXT)
    ranks = run_ranks(train_rank, P, names, boundaries, text, rounds, count, timeout=900)
    losses = {name: each for _, on_rank in ranks for name, each in on_rank.items()}
    rates = {
        name: [
            count * BATCH * CONTEXT / elapsed(turn) for turn in zip(*(spans[name] for spans, _ in ranks), strict=True)
        ]
        for name in names
    }
    rows = []
    for name in names:
        row = {"contender": name, "tokens_per_second": summary(rates[name])}
        for reference in ("torch", "unpipelined"):
            if reference in names:
                row[f"over_{reference}"] = ratios(rates[name], rates[reference])
        rows.append(row)
    steps = list(zip(*losses.values(), strict=True))
    return {
        "results": rows,
        "steps": len(steps),
        "loss_first": steps[0][0],
        "loss_last": steps[-1][0],
        "loss_max_abs_diff": max(max(step) - min(step) for step in steps),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    rows = [
        [
            row["contender"],
            spread(row["tokens_per_second"], 0),
            *(spread(row[key], 2) if key in row else "-" for key in ("over_torch", "over_unpipelined")),
        ]
        for row in result["results"]
    ]
    title = (
        f"GPT of {BLOCKS} blocks of width {WIDTH}, batch {BATCH} x {CONTEXT}, P={P}, M={M}; "
        f"{result['steps']} steps, loss {result['loss_first']:.3f} to {result['loss_last']:.3f}, "
        f"contenders at most {result['loss_max_abs_diff']:.1e} apart"
    )
    return [(title, ["contender", "tokens/s", "over torch", "over unpipelined"], rows)]


def main() -> None:
    chosen = options("A small GPT in training on two processes: tokens per second.", CONTENDERS)
    result = {
        "benchmark": "train",
        "environment": environment(),
        "P": P,
        "M": M,
        "batch": BATCH,
        "context": CONTEXT,
        "width": WIDTH,
        "blocks": BLOCKS,
        "rounds": chosen.rounds,
        **measure(chosen.contenders, chosen.rounds, count=2 if chosen.quick else 10),
    }
    show(result, tables(result), chosen.json)


if __name__ == "__main__":
    main()
