"""Tensors of classes of their own, which a stage returns beside its output."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.masked
import transparency
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree


class Doubling(Tensor):
    """A plain subclass, whose products are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made.as_subclass(Tensor) * 2 if func is Tensor.mul else made


class Wrapping(Tensor):
    """A subclass without memory of its own, around a tensor."""

    _held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        make: Any = Tensor._make_wrapper_subclass
        made = make(cls, held.shape, dtype=held.dtype, device=held.device)
        made._held = held
        return made

    @classmethod  # torch declares a plain function
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def held(value: Any) -> Any:
            return value._held if isinstance(value, Wrapping) else value

        made = func(*pytree.tree_map(held, args), **pytree.tree_map(held, kwargs or {}))
        return pytree.tree_map(lambda value: Wrapping(value) if isinstance(value, Tensor) else value, made)


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "Doubling": lambda tensor: tensor.as_subclass(Doubling),
    "Wrapping": Wrapping,
    "MaskedTensor": lambda tensor: torch.masked.masked_tensor(tensor, tensor > 0),
}


class _Returns(nn.Module):
    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor, *_: Any) -> Any:
        made = self.linear(x)
        return made if self.kind is None else (made, KINDS[self.kind](made.detach()))


def refused(rank: int, size: int, group: Any, name: str, link: str, kind: str, returns: int) -> str:
    """What is raised where stage `returns` returns such a tensor."""
    count = transparency.count_stages(name, size)
    modules: list[nn.Module] = [_Returns(kind if stage == returns else None) for stage in range(count)]
    with patch.dict(os.environ, {"PYPIPE_LINK": link}):
        schedule, _ = transparency.build(rank, size, group, name, modules, 2, loss_fn=functional.mse_loss, timeout=30)
        try:
            schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
        except Exception as error:
            return str(error)
        finally:
            schedule.close()
    return "nothing was raised"
