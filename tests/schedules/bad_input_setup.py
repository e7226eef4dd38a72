"""What a pipeline is built and called with, for cases to spoil; stages and results that do wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from models import Block
from torch import Tensor, nn
from torch.nn import functional

TIMEOUT = 20.0  # seconds; nothing here may wait for as long as that


@dataclasses.dataclass
class Setup:
    """What one rank builds its pipeline with, and calls it with. A case changes it on some ranks."""

    rank: int
    size: int
    index: int
    stages: int
    module: nn.Module
    args: tuple[Any, ...]
    target: Any
    microbatches: Any = 2
    loss: Any = functional.mse_loss
    schedule: str = "Schedule1F1B"
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    losses: Any = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the schedule
    stage_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    around: Callable[[], Any] = contextlib.nullcontext  # while step() runs
    late: bool = False  # whether other ranks may have ended their step by then, so that they hear of it at the next

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1


def make_setup(rank: int, size: int) -> Setup:
    torch.manual_seed(7)
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    return Setup(rank, size, rank, size, Block(6).double(), (x,), y)


class Returns(nn.Module):
    """Puts `value(output)` in the place of its output."""

    def __init__(self, value: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.block = Block(6).double()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value(self.block(x))


class Raises(nn.Module):
    """Raises at its n-th forward, or in the backward that belongs to it."""

    def __init__(self, error: BaseException, at: int, backward: bool = False) -> None:
        super().__init__()
        self.block = Block(6).double()
        self.error, self.at, self.backward, self.count = error, at, backward, 0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x)
        if self.count == self.at:
            if not self.backward:
                raise self.error
            output.register_hook(self._hook)
        self.count += 1
        return output

    def _hook(self, gradient: Tensor) -> None:
        raise self.error


class Mutters(RuntimeError):
    """An exception that cannot say what is wrong."""

    def __str__(self) -> str:
        raise ValueError("no words")


class WithFactor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6).double()

    def forward(self, x: Tensor, *more: Tensor, factor: Tensor) -> Tensor:
        return self.block(x) * factor


def open_file(output: Tensor) -> Any:
    return output, open(os.devnull)


def raise_(error: BaseException) -> Any:
    raise error


# Each case changes the setup of the ranks that it is about.
CASES: dict[str, Callable[[Setup], None]] = {}


def case(function: Callable[[Setup], None]) -> Callable[[Setup], None]:
    CASES[function.__name__] = function
    return function


@contextlib.contextmanager
def environment(**variables: str) -> Any:
    """Sets environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
