"""What the hard cases for autograd are made of: batches, cases, and the stages that most of them use."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

WIDTH = 4


@dataclasses.dataclass
class Batch:
    """A batch: `args` of the first stage, `kwargs` of every stage, `target`, and leaves behind them by stage."""

    args: tuple[Any, ...]
    target: Any
    kwargs: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    leaves: dict[int, list[Tensor]] = dataclasses.field(default_factory=dict)
    rows: int = 7


def plain_batch(rows: int = 7, **changes: Any) -> Batch:
    made = Batch(
        (torch.randn(rows, WIDTH, dtype=torch.float64),), torch.randn(rows, WIDTH, dtype=torch.float64), rows=rows
    )
    return dataclasses.replace(made, **changes)


def total(output: Any) -> Tensor:
    """One real tensor of everything that a stage returned; tensors of three dimensions are ignored."""
    tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.dim() < 3]
    reals = [x.real + 2 * x.imag if x.is_complex() else x for x in tensors]
    return sum((x.double() for x in reals), torch.zeros((), dtype=torch.float64))


def mse(output: Any, target: Tensor) -> Tensor:
    return functional.mse_loss(total(output), total(target))


def nothing(*_: Any) -> None:
    pass


@dataclasses.dataclass
class Case:
    """A model, its data, and what is done with it."""

    modules: Sequence[nn.Module]
    batch: Callable[[int], Batch] = lambda step: plain_batch()
    loss: Callable[..., Any] = mse
    loss_kwargs: dict[str, Any] | None = None
    n_microbatches: int = 3
    scale_grads: bool = True
    schedule_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 2
    tolerance: float = 1e-12
    double: bool = True
    around: Callable[[], Any] = contextlib.nullcontext
    after: Callable[[nn.Module, int], None] = nothing  # with a stage's module, after each step
    whole: bool = False  # the reference runs the whole batch at once
    join: Callable[[list[Any]], Any] = lambda outputs: torch.cat(outputs)  # of the reference's outputs


class Join(nn.Module):
    """An ordinary stage that takes whatever the one before returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *xs: Any, **named: Any) -> Tensor:
        return torch.sin(self.linear(total((xs, named))))  # saves its input, so its output may change in place


def joins(count: int) -> list[nn.Module]:
    return [Join() for _ in range(count)]


class Special(nn.Module):
    """A stage with something unusual in it: `function(self, x)`."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.p = nn.Parameter(torch.randn(WIDTH))
        self.s = nn.Parameter(torch.randn(1))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.function = function
        self.noted: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def join_trees(outputs: list[Any]) -> Any:
    flat = [pytree.tree_flatten(output)[0] for output in outputs]
    joined = []
    for values in zip(*flat, strict=True):
        if not isinstance(values[0], Tensor):
            joined.append(values[-1])
        else:
            joined.append(torch.stack(values) if values[0].dim() == 0 else torch.cat(values))
    return pytree.tree_unflatten(joined, pytree.tree_flatten(outputs[0])[1])
