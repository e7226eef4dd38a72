"""Stages that sleep, in three parts: forward, the gradient of the input, and the gradient of the weight."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

PARTS = ("forward", "input_backward", "weight_backward")


class SplitSleepStage(nn.Module):
    """Sleeps as a stage would compute. Autograd sees two nodes, so that a schedule may run W apart from I.

    Args:
        seconds: of each of PARTS.

    Attributes:
        spent: seconds spent in each part.
        count: how often each part ran.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds = seconds
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.count = dict.fromkeys(PARTS, 0)

    def sleep(self, part: str) -> None:
        """Run one part."""
        start = time.perf_counter()
        time.sleep(self.seconds)
        self.spent[part] += time.perf_counter() - start
        self.count[part] += 1

    def mean(self, part: str) -> float:
        """Seconds that a part took."""
        return self.spent[part] / max(self.count[part], 1)

    def forward(self, x: Tensor) -> Tensor:
        through: Tensor = _Input.apply(x, self)
        weight: Tensor = _Weight.apply(self.weight, self)
        return through + weight


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: SplitSleepStage) -> Tensor:
        ctx.stage = stage
        stage.sleep("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.stage.sleep("input_backward")
        return grad.clone(), None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, stage: SplitSleepStage) -> Tensor:
        ctx.stage = stage
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.stage.sleep("weight_backward")
        return grad.clone(), None
