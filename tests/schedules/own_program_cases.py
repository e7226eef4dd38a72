"""What ranks do with programs of their user's."""

from __future__ import annotations

from typing import Any

import torch
import transparency
from torch import nn
from torch.nn import functional

import pypipe
from pypipe.program import Program, build
from pypipe.program.builders import registry
from pypipe.program.builders.registry import register


def trains(rank: int, size: int, group: Any, path: str) -> list[str]:
    """Whether two copies' gradients are those of one model."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(3, 3).double() for _ in range(transparency.count_stages(path, size))]
    whole = nn.Sequential(*modules)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    expected = torch.autograd.grad(functional.mse_loss(whole(x), y), list(whole.parameters()))
    schedule, held = transparency.build(rank, size, group, path, modules, 4, loss_fn=functional.mse_loss, timeout=20.0)
    with schedule:
        schedule.step(x, target=y)
    found = []
    for piece, module in held:
        for parameter, gradient in zip(module.parameters(), expected[2 * piece : 2 * piece + 2], strict=True):
            if not transparency.difference(parameter.grad, gradient) <= transparency.TOLERANCE:
                found.append(f"rank {rank}, piece {piece}: a gradient differs")
    return found


def refused(rank: int, size: int, group: Any, path: str) -> str:
    """What a file's program is refused with."""
    stage = pypipe.PipelineStage(nn.Linear(3, 3), rank, size, group=group)
    try:
        with pypipe.Schedule(path, stage, 1, functional.mse_loss, timeout=20.0) as schedule:
            schedule.step(torch.ones(1, 3), target=torch.ones(1, 3))
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def registered(rank: int, size: int, group: Any) -> list[str]:
    """Trains by the name of a builder that is registered here."""

    @register("mine")
    def mine(n_ranks: int, n_microbatches: int) -> Program:
        like = build("zb_h1", n_ranks, n_microbatches)
        return Program("mine", n_microbatches, like.placement, like.ranks)

    try:
        return transparency.compare(rank, size, group, "mine", "mlp", 5, 11, True)
    finally:
        del registry._builders["mine"]
