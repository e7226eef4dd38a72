"""Stages, and their backwards in one piece and in two."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pypipe.runtime.autograd.engine import gradient_edge, run_backward
from pypipe.runtime.autograd.split import SplitBackward, WeightWork

Module = TypeVar("Module", bound=nn.Module)

COSTLY = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "embedding_dense_backward")


class Operations(TorchDispatchMode):
    """Counts costly operations; a convolution's backward counts once for each gradient that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in COSTLY:
            self.counts[name] += sum(args[-1]) if name == "convolution_backward" else 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """A transformer's."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attend(self.norm1(x)).chunk(3, -1)
        x = x + self.merge(functional.scaled_dot_product_attention(q, k, v))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Tied(nn.Module):
    """A weight used again behind itself, and beside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.weight) @ self.weight
        return self.linear(x) @ self.weight.t() * self.weight[0]


class Tokens(nn.Module):
    """A language model with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(5, 8))
        self.block, self.norm = Block(), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens((x[..., 0].abs() * 5).long() % 11) + self.positions
        return functional.linear(self.norm(self.block(x)), self.tokens.weight)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, bias=False),
            nn.GroupNorm(2, 4),
            nn.ConvTranspose2d(4, 2, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[:, None])


class Recurrent(nn.Module):
    """Cells: weights used once a time step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(8, 8), nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        hidden = torch.zeros(len(x), 8, dtype=x.dtype)
        for step in x.unbind(1):
            state = self.lstm(step, state)
            hidden = self.gru(state[0], hidden)
        return hidden


class Experts(nn.Module):
    """Some get no token, one is never used, and rows are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts[:3]):
            chosen = gates.argmax(-1) == i
            out[chosen] = expert(x[chosen]) * gates[chosen][:, i : i + 1]
        return out + x


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8).requires_grad_(False)
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.bias.requires_grad_(False)
        self.third.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)).relu())


class Reparametrized(nn.Module):
    """Weights that are computed from weights."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.base, self.low, self.rank = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(x).tanh()
        return functional.linear(x, self.base.weight + self.rank.weight @ self.low.weight * 0.5, self.base.bias)


class Many(nn.Module):
    """Returns its input, something of weights alone, and something unused further on; uses its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.query = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        return x, self.query.exp() * 2, self.linear(x) * x + x[:, :1], self.query + x


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(4) + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).relu_().clone()
        x[..., :4].mul_(self.scale)
        return self.second(x).add_(x)


class Autocast(nn.Module):
    """A weight cast once and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.second(self.linear(self.linear(x)).relu()).float()


class Scaled(torch.autograd.Function):
    """A Function of a weight and an activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        return gradient * weight, (gradient * x).sum_to_size(weight.shape)


class Doubled(torch.autograd.Function):
    """A Function of anything; what it keeps lies where autograd can't see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.two = torch.full_like(x, 2)
        return x * ctx.two

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.two


class Functions(nn.Module):
    """Custom Functions of activations, and of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(functional.linear(Doubled.apply(self.linear(x)), Doubled.apply(self.second.weight)))


class Fused(nn.Module):
    """A custom Function that computes a weight's gradient, between layers that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Scaled.apply(self.linear(x), self.scale))


class Checkpointed(nn.Module):
    """The middle one of three layers is recomputed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), Block(), nn.Linear(8, 8)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.layers
        return last(checkpoint(middle, first(x), use_reentrant=self.reentrant))


class Compiled(nn.Module):
    """The middle one of three layers is compiled."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.layers
        return last(torch.compile(lambda x: middle(x).tanh(), backend=self.backend)(first(x)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4))


# Stages that can be split.
SPLIT: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 4),
    "mlp": mlp,
    "transformer": lambda: nn.Sequential(Block(), Block()),
    "tied": Tied,
    "tokens": Tokens,
    "images": Images,
    "recurrent": Recurrent,
    "experts": Experts,
    "frozen": Frozen,
    "reparametrized": Reparametrized,
    "many": Many,
    "autocast": Autocast,
    "functions": Functions,
    "compiled, eager": lambda: Compiled("eager"),
}


@dataclass
class Outcome:
    """What a backward did: gradients by name, "input" among them; operations; the weights that had theirs after I."""

    gradients: dict[str, Tensor | None]
    first: Counter[str]
    second: Counter[str]
    early: list[str]
    warned: list[str]


class Stage(Generic[Module]):
    """A module and one forward's graph after the other."""

    def __init__(self, module: Module, *, needs_grad: bool) -> None:
        self.module = module
        self.needs_grad = needs_grad
        self.split = SplitBackward("stage 1")
        self.inputs: list[Tensor] = []

    def forward(self, data: Tensor) -> tuple[list[Any], list[Tensor]]:
        """The graph's roots, and a gradient for each."""
        x = data.clone().requires_grad_(self.needs_grad)
        self.inputs.append(x)
        outputs = self.module(x)
        used = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y.requires_grad]
        return [gradient_edge(y) for y in used], [torch.ones_like(y).cumsum(0) for y in used]

    def begin(self, data: Tensor) -> WeightWork | None:
        """F and I."""
        roots, gradients = self.forward(data)
        return self.split.begin(roots, gradients, self.inputs[-1:])

    def full(self, data: Tensor) -> None:
        """F and B."""
        run_backward(*self.forward(data))

    def gradients(self) -> dict[str, Tensor | None]:
        found = {name: parameter.grad for name, parameter in self.module.named_parameters()}
        return found | {f"input {i}": x.grad for i, x in enumerate(self.inputs)}


def left(work: WeightWork | None) -> WeightWork:
    """W, of a microbatch that has left something to it."""
    assert work is not None
    return work


def both_ways(
    make: Callable[[], nn.Module], *, needs_grad: bool, dtype: torch.dtype = torch.float64
) -> tuple[Outcome, Outcome]:
    """A full backward of a new module, and its halves."""
    torch.manual_seed(0)
    module = make().to(dtype)
    data = torch.randn(3, 5, 8, dtype=dtype)
    outcomes = []
    for split in (False, True):
        stage = Stage(copy.deepcopy(module), needs_grad=needs_grad)
        roots, gradients = stage.forward(data)
        first, second = Operations(), Operations()
        work = None
        with warnings.catch_warnings(record=True) as caught, first:
            warnings.simplefilter("always")
            if split:
                work = stage.split.begin(roots, gradients, stage.inputs)
            else:
                run_backward(roots, gradients)
        early = [name for name, parameter in stage.module.named_parameters() if parameter.grad is not None]
        with second:
            if work is not None:
                work.run()
        warned = [str(warning.message) for warning in caught]
        outcomes.append(Outcome(stage.gradients(), first.counts, second.counts, early, warned))
    return outcomes[0], outcomes[1]


def assert_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], skip: Iterable[str] = ()) -> None:
    """Gradients are there for the same tensors, and equal to 1e-12."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        other = found[name]
        if gradient is None:
            assert other is None, name
        else:
            torch.testing.assert_close(other, gradient, rtol=1e-12, atol=1e-12, msg=f"{{}}, of {name}".format)
