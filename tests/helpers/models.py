"""Models cut into stages, and what the same model computes without a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def compiled(module: nn.Module, **options: Any) -> nn.Module:
    """The module compiled; torch.compile() is declared to return any callable."""
    made = torch.compile(module, **options)
    assert isinstance(made, nn.Module)
    return made


class Block(nn.Module):
    """A linear layer with a nonlinearity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Attention(nn.Module):
    """One pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Embed(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(tokens)
        return vectors


class MixedStage(nn.Module):
    """A stage with a dict output: activations, an integer mask, an output that nobody uses, numbers and strings."""

    def __init__(self, width: int, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.linear, self.unused = nn.Linear(width, width), nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Any) -> Any:
        if self.first:
            state = {"x": x, "mask": (x.sum(1) > 0).to(torch.int32), "parts": (x.new_zeros(0), None), "depth": 0}
        else:
            state = dict(x)
        h = torch.tanh(self.linear(state["x"])) * (1 + state["mask"].unsqueeze(1))
        h.mul_(self.scale)
        if self.last:
            return h
        return {
            "x": h.t().contiguous().t(),
            "mask": state["mask"],
            "ignored": self.unused(h),
            "parts": [h.detach()[:, ::2], (None, "text", 1.5)],
            "depth": state["depth"] + 1,
        }


class Identity(nn.Module):
    """A stage without parameters that returns its very input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _mlp(stages: int) -> tuple[list[nn.Module], Callable[[int], tuple[Any, Any]], Callable[..., Tensor]]:
    def batch(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 6, dtype=torch.float64)

    return [Block(6) for _ in range(stages)], batch, functional.mse_loss


def _gpt(stages: int) -> tuple[list[nn.Module], Callable[[int], tuple[Any, Any]], Callable[..., Tensor]]:
    vocabulary, width, length = 11, 8, 5
    modules: list[nn.Module] = [Attention(width, 2) for _ in range(stages)]
    modules[0] = nn.Sequential(Embed(vocabulary, width), modules[0])
    modules[-1] = nn.Sequential(modules[-1], nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randint(vocabulary, (rows, length)), torch.randint(vocabulary, (rows, length))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    return modules, batch, loss


def _mixed(stages: int) -> tuple[list[nn.Module], Callable[[int], tuple[Any, Any]], Callable[..., Tensor]]:
    modules: list[nn.Module] = [MixedStage(6, stage == 0, stage == stages - 1) for stage in range(stages)]

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 6, dtype=torch.float64)

    return modules, batch, functional.mse_loss


def _identities(stages: int) -> tuple[list[nn.Module], Callable[[int], tuple[Any, Any]], Callable[..., Tensor]]:
    modules, batch, loss = _mlp(stages)
    for stage in range(1, stages):
        modules[stage] = Identity()
    return modules, batch, loss


MODELS = {"mlp": _mlp, "gpt": _gpt, "mixed": _mixed, "identities": _identities}


def make(
    name: str, stages: int, seed: int = 0
) -> tuple[list[nn.Module], Callable[[int], tuple[Any, Any]], Callable[..., Tensor]]:
    """The stages of a model in float64, a function that makes a batch of some rows, and the loss function."""
    torch.manual_seed(seed)
    modules, batch, loss = MODELS[name](stages)
    for module in modules:
        module.double()
    return modules, batch, loss


def call(module: nn.Module, value: Any) -> Any:
    """Calls a stage with what the stage before returned."""
    return module(*value) if isinstance(value, (tuple, list)) else module(value)


def unpipelined(modules: list[nn.Module], x: Any) -> Any:
    """The whole model."""
    for module in modules:
        x = call(module, x)
    return x


def twins(modules: list[nn.Module]) -> list[nn.Module]:
    """Copies of the stages, for the run without a pipeline."""
    return [copy.deepcopy(module) for module in modules]
