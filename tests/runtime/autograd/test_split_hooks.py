"""Hooks run once, in either half, with the gradients that a full backward gives them."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import grad
from split_cases import Stage, assert_equal, left
from torch import Tensor, nn

from pypipe.runtime.autograd.split import SplitBackward


class Hooked(nn.Module):
    """Counts every kind of hook; some change gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.calls: Counter[str] = Counter()
        self.retained: list[Tensor] = []
        self.first.weight.register_hook(self.seen("weight", 2))
        self.third.bias.register_hook(self.seen("bias", 3))
        self.second.weight.register_post_accumulate_grad_hook(lambda p: self.calls.update(["accumulated"]))
        self.second.register_full_backward_hook(lambda *_: self.calls.update(["module"]))
        self.third.register_full_backward_pre_hook(lambda *_: self.calls.update(["module before"]))

    def seen(self, name: str, factor: float) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            self.calls[name] += 1
            return gradient * factor

        return hook

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hooked":
        made = Hooked()
        made.double().load_state_dict(self.state_dict())
        return made

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        first.register_hook(self.seen("output", 0.5))
        first.grad_fn.register_prehook(lambda gradients: self.calls.update(["node before"]))
        first.grad_fn.register_hook(lambda *_: self.calls.update(["node after"]))
        cast = self.third.weight * 2
        cast.register_hook(self.seen("of weights alone", 5))
        first.retain_grad()
        self.retained.append(first)
        return nn.functional.linear(self.second(first.tanh()), cast, self.third.bias) + self.third(first)


@pytest.mark.parametrize("needs_grad", [True, False], ids=["later", "first"])
def test_hooks_run_once(needs_grad: bool) -> None:
    torch.manual_seed(0)
    module = Hooked().double()
    whole, halves = (Stage(copy.deepcopy(module), needs_grad=needs_grad) for _ in range(2))
    data = [torch.randn(2, 8, dtype=torch.float64) for _ in range(2)]
    for x in data:
        whole.full(x)
    works = [left(halves.begin(x)) for x in data]
    in_first_half = Counter(halves.module.calls)
    for work in works:
        work.run()
    assert_equal(halves.gradients(), whole.gradients())
    assert halves.module.calls == whole.module.calls
    assert set(whole.module.calls.values()) == {2}
    assert in_first_half == dict.fromkeys(["output", "node before", "node after", "module", "module before"], 2)
    for other, tensor in zip(halves.module.retained, whole.module.retained, strict=True):
        assert torch.equal(grad(other), grad(tensor))


def test_a_weight_used_twice_is_accumulated_once() -> None:
    # As DDP counts on: one accumulation per backward and parameter.
    weight = nn.Parameter(torch.eye(4))
    counts: Counter[str] = Counter()
    weight.register_post_accumulate_grad_hook(lambda p: counts.update(["accumulated"]))
    weight.register_hook(lambda gradient: counts.update(["gradient"]))
    x = torch.randn(4, 4, requires_grad=True)
    y = torch.tanh(x @ weight) @ weight.t() + nn.functional.embedding(torch.arange(4), weight)
    work = left(SplitBackward("stage 0").begin([y], [torch.ones_like(y)], [x]))
    assert not counts
    work.run()
    assert counts == {"accumulated": 1, "gradient": 1}


def test_an_optimizer_in_the_backward() -> None:
    # A hook may use a gradient up at once and leave no `.grad`.
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    other = copy.deepcopy(layers)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= grad(parameter)
        parameter.grad = None

    for model in (layers, other):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
    y = layers(x)
    left(SplitBackward("stage 0").begin([y], [torch.ones_like(y)], [x])).run()
    other(x).sum().backward()
    assert all(p.grad is None for p in layers.parameters())
    assert_equal(layers.state_dict(), other.state_dict())
