"""Where weights cannot wait for W, I computes their gradients as well, and says so once."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_cases import Checkpointed, Compiled, Fused, Stage, assert_equal, both_ways, left, mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pypipe.runtime.autograd.split import SplitBackward


class Activated(nn.Module):
    """PReLU's kernel computes both of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("make", "early", "reason", "needs_grad"),
    [
        pytest.param(Fused, ["scale"], "Scaled computes all its gradients at once", True, id="Function"),
        pytest.param(Fused, ["scale"], "Scaled computes all its gradients at once", False, id="Function, first stage"),
        pytest.param(Activated, ["layers.1.weight"], "PreluKernel computes all", True, id="kernel"),
        pytest.param(Activated, ["layers.1.weight"], "PreluKernel computes all", False, id="kernel, first stage"),
        pytest.param(
            lambda: Checkpointed(reentrant=True), None, "reentrant activation checkpointing", True, id="again"
        ),
        pytest.param(lambda: Compiled("aot_eager"), None, "a compiled graph computes all", True, id="compiled"),
    ],
)
def test_early_weights(make: Callable[[], nn.Module], early: list[str] | None, reason: str, needs_grad: bool) -> None:
    whole, halves = both_ways(make, needs_grad=needs_grad)
    assert_equal(halves.gradients, whole.gradients)
    assert halves.first + halves.second == whole.first
    assert halves.early == (whole.early if early is None else early)
    assert len(halves.warned) == 1
    assert halves.warned[0].startswith("stage 1: the gradients of")
    assert reason in halves.warned[0]


@pytest.mark.parametrize("needs_grad", [True, False], ids=["later", "first"])
def test_a_checkpoint_recomputes_once(needs_grad: bool) -> None:
    """Layers outside it still split; an older torch, which can't tell, learns from the first microbatch."""
    stage = Stage(Checkpointed(reentrant=False).double(), needs_grad=needs_grad)
    other = Stage(Checkpointed(reentrant=False).double(), needs_grad=needs_grad)
    other.module.load_state_dict(stage.module.state_dict())
    recomputed: list[int] = []
    stage.module.layers[1].register_forward_pre_hook(lambda *_: recomputed.append(1))
    data = [torch.randn(3, 5, 8, dtype=torch.float64) for _ in range(3)]
    with pytest.warns(UserWarning, match="stage 1") as caught:
        works = [stage.begin(x) for x in data]
    runs = len(recomputed)
    for work in works:
        if work is not None:
            work.run()
    for x in data:
        other.full(x)
    assert_equal(stage.gradients(), other.gradients())
    assert len(caught) == 1
    assert runs == 2 * len(data)
    if hasattr(torch._C._autograd.SavedTensor, "unpack_hook"):
        assert len(recomputed) == runs
        assert all(work is not None for work in works)
    else:
        assert len(recomputed) <= runs + 1
        assert works[1] is works[2] is None


def test_a_stage_that_is_one_checkpoint() -> None:
    layers, x = mlp(), torch.randn(3, 8, requires_grad=True)
    split = SplitBackward("stage 3")
    outputs = [checkpoint(layers, x, use_reentrant=False) for _ in range(2)]
    with pytest.warns(UserWarning, match="stage 3: the gradients of") as caught:
        works = [split.begin([y], [torch.ones_like(y)], [x]) for y in outputs]
    assert len(caught) == 1
    for work in works:
        if work is not None:
            work.run()
    expected = torch.autograd.grad(layers(x).sum() * 2, [*layers.parameters(), x])
    for tensor, gradient in zip([*layers.parameters(), x], expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


class Refusing(torch.autograd.Function):
    """As checkpoints of other libraries do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("not compatible with .grad()")
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos()


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Refusing.apply(self.first(x)).tanh()).tanh()


def test_a_function_that_refuses() -> None:
    whole, halves = both_ways(Refused, needs_grad=True)
    assert_equal(halves.gradients, whole.gradients)
    assert halves.early == whole.early
    assert len(halves.warned) == 1
    assert "not compatible with .grad()" in halves.warned[0]
    stage = Stage(Refused(), needs_grad=True)
    with pytest.warns(UserWarning, match="refused") as caught:
        assert all(stage.begin(torch.randn(2, 8)) is None for _ in range(3))
    assert len(caught) == 1


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("a fault of its own")


def test_a_fault_stays_one() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(2, 8, requires_grad=True)
    split = SplitBackward("stage 0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = Broken.apply(layer(x))
        with pytest.raises(RuntimeError, match="a fault of its own"):
            split.begin([y], [torch.ones_like(y)], [x])
        y = layer(x)
        handle = y.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            split.begin([y], [torch.ones_like(y)], [x])
        handle.remove()
        y = layer(x)
        left(split.begin([y], [torch.ones_like(y)], [x])).run()
    torch.testing.assert_close(layer.bias.grad, torch.full((8,), 2.0))


def test_saved_tensors_that_hooks_pack() -> None:
    """What offloading unpacks twice is right twice."""
    layers, x = mlp(), torch.randn(3, 8, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = layers(x)
    work = left(SplitBackward("stage 0").begin([y], [torch.ones_like(y)], [x]))
    assert all(p.grad is None for p in layers.parameters())
    work.run()
    expected = torch.autograd.grad(layers(x).sum(), [*layers.parameters(), x])
    for tensor, gradient in zip([*layers.parameters(), x], expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


@pytest.mark.parametrize("after", ["I", "W"])
def test_a_second_backward_is_refused(after: str) -> None:
    layers, x = mlp(), torch.randn(3, 8, requires_grad=True)
    y = layers(x)
    work = left(SplitBackward("stage 0").begin([y], [torch.ones_like(y)], [x]))
    if after == "W":
        work.run()
    with pytest.raises(RuntimeError, match="a second time"):
        y.sum().backward()


def test_early_gradients_are_not_those_that_wait() -> None:
    """A first `.grad` may be a view of the very gradient that a weight waits with; more is added to it in place."""

    class Aliasing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
            return x + bias

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            return gradients[0], gradients[0].view_as(gradients[0])

    torch.manual_seed(0)
    layer, bias = nn.Linear(4, 4).double(), nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    data = torch.randn(2, 3, 4, dtype=torch.float64)
    split = SplitBackward("stage 0")
    inputs = [part.clone().requires_grad_() for part in data]
    outputs = [Aliasing.apply(layer(x), bias) for x in inputs]
    with pytest.warns(UserWarning, match="Aliasing computes"):
        works = [left(split.begin([y], [torch.ones_like(y)], [x])) for x, y in zip(inputs, outputs, strict=True)]
    for work in works:
        work.run()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 2))
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 6.0, dtype=torch.float64))
    torch.testing.assert_close(layer.weight.grad, data.sum((0, 1)).expand(4, 4))
