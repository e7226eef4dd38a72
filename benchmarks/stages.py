"""Stages whose cost is known: one that sleeps and times itself, one that is as good as free."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD_SECONDS = 0.005
BACKWARD_SECONDS = 0.010


class SleepStage(nn.Module):
    """Sleeps as long as a stage would compute, and makes new tensors of the boundary's size as it would.

    ``seconds`` adds up the time spent inside forward and backward, the making of those tensors included: the
    cost of the stage itself, against which a pipeline's step is measured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(x, self.weight, self)
        return out


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: SleepStage) -> Tensor:
        start = time.perf_counter()
        ctx.stage = stage
        time.sleep(FORWARD_SECONDS)
        out = x + weight  # reads the whole input and writes the whole output
        stage.seconds += time.perf_counter() - start
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        start = time.perf_counter()
        time.sleep(BACKWARD_SECONDS)
        grad_x = grad.clone(memory_format=torch.contiguous_format)
        # One element stands for the sum: a nonzero number that all contenders must agree on, and cheap.
        grad_weight = grad_x.flatten()[:1].clone()
        ctx.stage.seconds += time.perf_counter() - start
        return grad_x, grad_weight, None


class _FirstElement(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.shape = out.shape
        return out.flatten()[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.shape)


def free_loss(out: Tensor, target: Tensor) -> Tensor:
    """A loss that costs nothing at any size, so that all the time of the last stage is the stage's own."""
    loss: Tensor = _FirstElement.apply(out)
    return loss


def tiny_stage(width: int) -> nn.Module:
    """A stage that computes next to nothing: what is left of a step is the host's own cost."""
    return nn.Linear(width, width)
