"""I and W give the gradients of a full backward, and compute each once."""

import copy
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pypipe.runtime.backward import run_backward
from pypipe.runtime.split import SplitBackward

COSTLY = ("mm", "bmm", "addmm", "convolution", "convolution_backward", "embedding_dense_backward")


class Operations(TorchDispatchMode):
    """Counts operations; a convolution's backward counts once for each gradient that it computes."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] += sum(args[-1]) if name == "convolution_backward" else 1
        return func(*args, **(kwargs or {}))

    @property
    def costly(self):
        return Counter({name: self.counts[name] for name in COSTLY if self.counts[name]})


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.attend(self.norm1(x)).chunk(3, -1)
        x = x + self.merge(functional.scaled_dot_product_attention(q, k, v))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Tied(nn.Module):
    """A weight used three times, once after the other; one beside."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.tanh(x @ self.weight) @ self.weight
        return self.linear(x) @ self.weight.t() * self.weight[0]


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(5, 8))
        self.block = Block()

    def forward(self, x):
        return self.block(self.tokens((x[..., 0].abs() * 5).long() % 11) + self.positions)


MODELS = {
    "linear": lambda: nn.Linear(8, 4),
    "mlp": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4)),
    "transformer": lambda: nn.Sequential(Block(), Block()),
    "tied": Tied,
    "tokens": Tokens,
}


def both_ways(make, *, needs_grad, dtype=torch.float64):
    """The gradients and operations of a full backward, and those of I and W."""
    torch.manual_seed(0)
    module = make().to(dtype)
    data = torch.randn(3, 5, 8, dtype=dtype)
    runs = []
    for split in (False, True):
        stage, x = copy.deepcopy(module), data.clone().requires_grad_(needs_grad)
        y = stage(x)
        edges, gradients = [get_gradient_edge(y)], [torch.ones_like(y).cumsum(0)]
        del y
        first, second = Operations(), Operations()
        early = None
        with first:
            if split:
                work = SplitBackward("stage 0").begin(edges, gradients, [x])
            else:
                run_backward(edges, gradients)
        early = [name for name, p in stage.named_parameters() if p.grad is not None]
        with second:
            if split and work is not None:
                work.run()
        found = {name: p.grad for name, p in stage.named_parameters()} | {"input": x.grad}
        runs.append((found, first.costly, second.costly, early))
    return runs


@pytest.mark.parametrize("needs_grad", [True, False], ids=["later", "first"])
@pytest.mark.parametrize("name", MODELS)
def test_halves_are_the_whole(name, needs_grad):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (expected, costs, _, _), (found, input_costs, weight_costs, early) = both_ways(
            MODELS[name], needs_grad=needs_grad
        )
    for key, gradient in expected.items():
        torch.testing.assert_close(
            found[key], gradient, rtol=1e-12, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert not early
    assert input_costs + weight_costs == costs
