"""What a stage's forward can ask of the pipeline that runs it, and add to its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pypipe.errors import InputError
from pypipe.runtime.step.current import Current, current

__all__ = ["Microbatch", "add_loss", "microbatch"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A microbatch, as `microbatch()` tells of it.

    Attributes:
        index: which one, from 0.
        count: how many the batch has, M.
        rows: how many rows of the batch it has; None where that is not known.
    """

    index: int
    count: int
    rows: int | None


def microbatch() -> Microbatch:
    """Tells within a stage's forward, or in its recomputation, which microbatch it is of.

    Returns:
        Outside a pipeline, index 0 of 1 with unknown rows: so the same module runs without one.
    """
    now = current()
    return Microbatch(0, 1, None) if now is None else Microbatch(now.number, now.total, now.rows)


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Adds an auxiliary loss to the batch's, such as one that balances experts, within a stage's forward.

    Return the result, or compute with it, in place of `x`: the loss's gradient is made when that of the result comes
    back. It is weighted as the main loss is: by the microbatch's share of the batch's rows (with scale_grads=False by
    1), and by a `pypipe.GradScaler`'s scale. Outside a pipeline its weight is 1. Without gradients, as in eval(),
    nothing is added. The loss's value is in no one's losses: keep or log it yourself.

    Args:
        x: a floating-point tensor that the stage's output depends on.
        loss: one element.

    Returns:
        The values of `x`, on its memory.

    Raises:
        InputError: the loss has more elements than one.
    """
    if loss.numel() != 1:
        raise InputError(f"add_loss() takes a loss of one element, not of shape {tuple(loss.shape)}: take its mean")
    if not torch.is_grad_enabled() or not loss.requires_grad:
        return x
    made: Any = _WithLoss
    result: Tensor = made.apply(x, loss, current())
    return result


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, now: Current | None) -> Tensor:
        ctx.now, ctx.loss = now, (loss.shape, loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shape, dtype, device = ctx.loss
        weight = 1.0 if ctx.now is None else ctx.now.weight()
        return gradients[0], torch.full(shape, weight, dtype=dtype, device=device), None
