"""Trains a model with and without a pipeline on the same rank processes, and compares everything."""

from __future__ import annotations

from typing import Any

import torch
from models import make, twins, unpipelined
from torch import Tensor, nn

import pypipe

TOLERANCE = 1e-12


def difference(a: Tensor | None, b: Tensor | None) -> float:
    """The largest difference, relative to the largest value; 0 for two absent gradients."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    return (
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) if b.is_floating_point() else float((a != b).any())
    )


def optimizer(module: nn.Module) -> Any:
    """AdamW: its weight decay moves a parameter whose gradient is zero, and leaves one without a gradient alone.

    A key's bias has no influence on attention, so its gradient is rounding noise, which the usual eps of 1e-8 would
    blow up to steps of visible size, different ones for any other order of summation.
    """
    parameters = list(module.parameters())
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-4) if parameters else None


def compare(
    rank: int, size: int, group: Any, schedule_name: str, model: str, n_microbatches: int, rows: int, scale_grads: bool
) -> list[str]:
    """Three optimizer steps and evals in between; returns what differs, in words."""
    modules, make_batch, loss_fn = make(model, size)
    reference = twins(modules)
    batches = [make_batch(rows) for _ in range(4)]
    stage = pypipe.PipelineStage(modules[rank], rank, size, torch.device("cpu"), group=group)
    schedule = getattr(pypipe, schedule_name)(
        stage, n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads, timeout=30
    )
    differences: list[str] = []

    def check(what: str, a: Tensor | None, b: Tensor | None) -> None:
        worst = difference(a, b)
        if not worst <= TOLERANCE:
            differences.append(f"rank {rank}: {what} differs by {worst:g}")

    mine, theirs = optimizer(modules[rank]), [optimizer(module) for module in reference]
    for number, (x, y) in enumerate(batches[:3]):
        losses: list[Tensor] = []
        output = schedule.step(x, target=y, losses=losses)
        expected = unpipelined(reference, x)
        chunks = list(
            zip(torch.tensor_split(expected, n_microbatches), torch.tensor_split(y, n_microbatches), strict=True)
        )
        if scale_grads:
            loss_fn(expected, y).backward()
        else:
            torch.stack([loss_fn(*chunk) for chunk in chunks]).sum().backward()
        if rank == size - 1:
            check(f"output of step {number}", output, expected.detach())
            check(f"losses of step {number}", torch.stack(losses), torch.stack([loss_fn(*c) for c in chunks]).detach())
        elif output is not None or losses:
            differences.append(f"rank {rank} got an output or losses")
        for (name, a), b in zip(modules[rank].named_parameters(), reference[rank].parameters(), strict=True):
            check(f"gradient of {name} in step {number}", a.grad, b.grad)
        if mine is not None:
            mine.step()
            mine.zero_grad()
        for other in theirs:
            if other is not None:
                other.step()
                other.zero_grad()
        evaluated = schedule.eval(batches[3][0])
        if rank == size - 1:
            with torch.no_grad():
                check(f"output of eval {number}", evaluated, unpipelined(reference, batches[3][0]))
        if any(parameter.grad is not None for parameter in modules[rank].parameters()):
            differences.append("eval() touched a gradient")
    for (name, a), b in zip(modules[rank].state_dict().items(), reference[rank].state_dict().values(), strict=True):
        check(f"{name} after three steps", a, b)
    schedule.close()
    return differences


def compare_many(rank: int, size: int, group: Any, cases: list[tuple[str, str, int, int, bool]]) -> list[str]:
    """Several cases in one call."""
    return [f"{case}: {text}" for case in cases for text in compare(rank, size, group, *case)]
