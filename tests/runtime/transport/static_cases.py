"""Schedules with shapes="static": what stays as it was in the first step, and what does not."""

from __future__ import annotations

from typing import Any

import torch
import transparency
from models import make, twins, unpipelined

import pypipe

CPU = torch.device("cpu")
MICROBATCHES = 4


def train(rank: int, size: int, group: Any, name: str) -> list[str]:
    """Steps and evals, each with microbatches of two lengths; what differs from the unpipelined model."""
    count = size * (2 if "v=2" in name or "ZBV" in name else 1)
    modules, batch, loss_fn = make("mlp", count)
    reference = twins(modules)
    schedule, mine = transparency.build(
        rank, size, group, name, modules, MICROBATCHES, CPU, loss_fn=loss_fn, timeout=30, shapes="static"
    )
    found: list[str] = []
    for step in range(3):
        x, y = batch(10)
        schedule.step(x, target=y)
        loss_fn(unpipelined(reference, x), y).backward()
        evaluated = schedule.eval(x[:6])
        if evaluated is not None and not torch.allclose(evaluated, unpipelined(reference, x[:6]), atol=1e-12):
            found.append(f"rank {rank}, eval {step}: the output differs")
    for number, (module, other) in enumerate(zip(modules, reference, strict=True)):
        for (parameter, a), b in zip(module.named_parameters(), other.parameters(), strict=True):
            held = any(number == piece for piece, _ in mine)
            if held and not transparency.difference(a.grad, b.grad) <= transparency.TOLERANCE:
                found.append(f"rank {rank}, stage {number}: the gradient of {parameter} differs")
    schedule.close()
    return found


def broken(rank: int, size: int, group: Any, by: str) -> str:
    """What a rank raises once the promise is broken."""
    modules, batch, loss_fn = make("mlp", size)
    schedule, _ = transparency.build(
        rank, size, group, "Schedule1F1B", modules, MICROBATCHES, CPU, loss_fn=loss_fn, timeout=20, shapes="static"
    )
    x, y = batch(8)
    schedule.step(x, target=y)
    schedule.eval(x[:4])  # a promise of its own
    schedule.step(x, target=y)
    try:
        if by == "eval":
            schedule.eval(x)
        else:
            schedule.step(x[:4], target=y[:4])
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        schedule.close()
    return "nothing was raised"


def disagreeing(rank: int, size: int, group: Any) -> str:
    """Rank 0 promises, the others do not."""
    modules, batch, loss_fn = make("mlp", size)
    stage = pypipe.PipelineStage(modules[rank], rank, size, CPU, group=group)
    schedule = pypipe.Schedule1F1B(stage, 2, loss_fn, timeout=20, shapes="dynamic" if rank else "static")
    x, y = batch(8)
    try:
        schedule.step(x, target=y)
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        schedule.close()
    return "nothing was raised"
