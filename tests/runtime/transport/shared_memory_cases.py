"""Stages that return several tensors on one memory, of which the next changes one in place."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import transparency
from torch import Tensor, nn
from torch.nn import functional

KINDS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "view": lambda z: (z, z[:, :2]),
    "detached": lambda z: (z, z.detach()),
    "overlapping": lambda z: (z[:, :3], z[:, 2:]),
    "halves": lambda z: (z[:, :2], z[:, 2:]),
    "twice": lambda z: (z, z),
}


class _Stage(nn.Module):
    """Changes its second input in place, and lets the first go into its output."""

    def __init__(self, kind: str, last: bool) -> None:
        super().__init__()
        self.linear, self.kind, self.last = nn.Linear(4, 4), kind, last

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        if other is not None:
            other.mul_(2)
            x = functional.pad(x, (0, 4 - x.shape[1])) + other.sum(1, keepdim=True)
        made = self.linear(x)
        return made if self.last else KINDS[self.kind](made)


def run(rank: int, size: int, group: Any, name: str, link: str, kind: str, evaluates: bool) -> list[str]:
    """What is raised, or what differs from the unpipelined model."""
    torch.manual_seed(0)
    count = transparency.count_stages(name, size)
    modules: list[nn.Module] = [_Stage(kind, stage == count - 1).double() for stage in range(count)]
    reference = [_Stage(kind, stage == count - 1).double() for stage in range(count)]
    for module, twin in zip(modules, reference, strict=True):
        twin.load_state_dict(module.state_dict())
    x, y = torch.randn(2, 6, 4, dtype=torch.float64)
    with patch.dict(os.environ, {"PYPIPE_LINK": link}):
        schedule, held = transparency.build(
            rank, size, group, name, modules, 3, loss_fn=functional.mse_loss, timeout=30
        )
        try:
            output = schedule.eval(x) if evaluates else schedule.step(x, target=y)
            schedule.close()  # of an eval() that fails, the first rank may hear here
        except Exception as error:
            return [str(error)]
        finally:
            schedule.close()
    expected: Any = (x,)
    with torch.set_grad_enabled(not evaluates):
        for twin in reference:
            expected = twin(*expected)
    found = []
    if output is not None and not transparency.difference(output, expected.detach()) <= transparency.TOLERANCE:
        found.append("the output differs")
    if not evaluates:
        functional.mse_loss(expected, y).backward()
    for piece, module in held:
        for (parameter, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
            if not transparency.difference(a.grad, b.grad) <= transparency.TOLERANCE:
                found.append(f"{parameter} of stage {piece} differs")
    return found
