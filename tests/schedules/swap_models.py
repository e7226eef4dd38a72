"""Small stages and reproducible data for scripts that run with torch's classes and with pypipe's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.pipelining
from torch import Tensor, nn

CPU = torch.device("cpu")
ROWS, WIDTH, M = 8, 6, 4
Results = dict[str, Any]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Scaled(nn.Module):
    """Takes a keyword argument of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.layer(x) * scale


class Pair(nn.Module):
    """Takes and returns two tensors."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.a, self.b, self.last = Layer(), Layer(), last

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x, y = self.a(x) + y, self.b(y)
        return x * y if self.last else (x, y)


class TimeFirst(nn.Module):
    """Works on (time, batch, width); the last stage returns (batch, time, width)."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.layer, self.last = Layer(), last

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).cumsum(0)
        return x.transpose(0, 1).contiguous() if self.last else x


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, WIDTH), Layer()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.embedding(tokens))


def data(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def module_of(make: Callable[[], nn.Module], rank: int) -> nn.Module:
    torch.manual_seed(100 + rank)
    return make().double()


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
