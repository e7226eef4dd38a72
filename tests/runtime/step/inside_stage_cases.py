"""Stages whose forward asks for its microbatch and adds a loss of its own."""

from __future__ import annotations

from typing import Any

import torch
import transparency
from models import twins, unpipelined
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pypipe


class Balanced(nn.Module):
    """A layer with an auxiliary loss; notes the microbatches that it is called for."""

    def __init__(self, recomputed: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.recomputed = recomputed
        self.seen: list[pypipe.Microbatch] = []

    def _inner(self, x: Tensor) -> Tensor:
        self.seen.append(pypipe.microbatch())
        hidden = self.linear(x)
        return pypipe.add_loss(torch.tanh(hidden), 0.1 * hidden.square().mean())

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed and torch.is_grad_enabled():
            result: Tensor = checkpoint(self._inner, x, use_reentrant=self.recomputed == "reentrant")
            return result
        return self._inner(x)


def train(rank: int, size: int, group: Any, name: str, recomputed: str, scale_grads: bool) -> list[str]:
    """A step on an uneven batch; returns what differs from the unpipelined model."""
    torch.manual_seed(3)
    count = transparency.count_stages(name, size)
    modules: list[nn.Module] = [Balanced(recomputed).double() for _ in range(count)]
    reference = twins(modules)
    loss_fn = nn.functional.mse_loss
    schedule, held = transparency.build(
        rank, size, group, name, modules, 4, loss_fn=loss_fn, scale_grads=scale_grads, timeout=30
    )
    x, y = torch.randn(10, 4, dtype=torch.float64), torch.randn(10, 4, dtype=torch.float64)
    if recomputed == "reentrant":
        x.requires_grad_()  # else reentrant checkpoints give the first stage no gradient
    schedule.eval(x)
    schedule.step(x, target=y)
    if scale_grads:
        loss_fn(unpipelined(reference, x), y).backward()
    else:
        for a, b in zip(x.detach().tensor_split(4), y.tensor_split(4), strict=True):
            loss_fn(unpipelined(reference, a.requires_grad_()), b).backward()
    found = []
    for piece, module in held:
        for (parameter, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
            worst = transparency.difference(a.grad, b.grad)
            if not worst <= transparency.TOLERANCE:
                found.append(f"gradient of {parameter} of stage {piece} differs by {worst:g}")
        assert isinstance(module, Balanced)
        expected = {pypipe.Microbatch(index, 4, rows) for index, rows in enumerate([3, 3, 2, 2])}
        if not set(module.seen) <= expected or (name != "ScheduleDualPipe" and set(module.seen) != expected):
            found.append(f"stage {piece} saw {module.seen}")
    if pypipe.microbatch() != pypipe.Microbatch(0, 1, None):
        found.append(f"outside there is {pypipe.microbatch()}")
    schedule.close()
    return found
