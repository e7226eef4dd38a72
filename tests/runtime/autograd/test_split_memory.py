"""What is alive between I and W, and after W."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import grad
from split_cases import Block, left
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pypipe.runtime.autograd.engine import gradient_edge, run_backward
from pypipe.runtime.autograd.saved_tensors import Packed, names_of_saved, packed
from pypipe.runtime.autograd.split import SplitBackward

ROWS, WIDTH = 512, 16
UNIT = ROWS * WIDTH * 8  # one activation


class Live(TorchDispatchMode):
    """Bytes of what operations made, other than of the size of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def now(self) -> int:
        self.storages = {key: found for key, found in self.storages.items() if not found[0].expired()}
        return sum(size for _, size in self.storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= UNIT // 2:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out


class Layer(nn.Module):
    """Saves the linear's input, and the outputs of tanh and sigmoid, which no weight needs; returns their product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.tanh() * y.sigmoid()


def measured(module: nn.Module, split: bool) -> tuple[int, int, int, int]:
    """Bytes alive after F, after I (or B), and after W; the most during I (or B). The input is not counted."""
    x = torch.randn(8, ROWS // 8, WIDTH, dtype=torch.float64, requires_grad=True)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    live = Live()
    with live:
        y = module(x)
        roots, gradients = [gradient_edge(y)], [torch.ones_like(y)]
        del y
        live.storages.pop(x.untyped_storage()._cdata, None)
        after_forward, live.peak = live.now(), 0
        work = None
        if split:
            work = left(SplitBackward("stage 0").begin(roots, gradients, [x]))
        else:
            run_backward(roots, gradients)
        del roots, gradients
        x.grad = None
        live.storages.pop(x.untyped_storage()._cdata, None)
        after_input, peak = live.now(), live.peak
        if work is not None:
            work.run()
            live.storages.pop(x.untyped_storage()._cdata, None)
    return after_forward, after_input, live.now(), peak


def test_what_waits_is_what_weights_need() -> None:
    layers = 5
    module = nn.Sequential(*(Layer() for _ in range(layers))).double()
    forward, waiting, after, peak = measured(module, split=True)
    # F: tanh, sigmoid, and but for the last, their product, which is the next one's input; the root's gradient.
    assert forward == (3 * layers - 1 + 1) * UNIT
    # W needs each linear's input, of which the first is not counted, and the gradient of its output.
    assert waiting == (2 * layers - 1) * UNIT
    assert after == 0
    _, none, _, full_peak = measured(module, split=False)
    assert none == 0
    # I frees as it goes, as a full backward does.
    assert peak <= full_peak + UNIT


@pytest.mark.parametrize("name", ["transformer", "images"])
def test_nothing_is_left(name: str) -> None:
    module: nn.Module
    if name == "transformer":
        module = Block(WIDTH)
    else:
        module = nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    module = module.double()
    forward, waiting, after, peak = measured(module, split=True)
    assert 0 < waiting <= forward + UNIT
    assert after == 0
    assert peak <= measured(module, split=False)[3] + waiting // 2


def test_the_weight_half_needs_little_room() -> None:
    # Each weight's gradient is a sum over a product as large as the activation: one of these at a time.
    weights = [nn.Parameter(torch.ones(WIDTH, dtype=torch.float64)) for _ in range(6)]
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    live = Live()
    with live:
        y = sum((x * weight for weight in weights[1:]), x * weights[0])
        work = left(SplitBackward("stage 0").begin([y], [torch.ones_like(y)], [x]))
        waiting, live.peak = live.now(), 0
        work.run()
    assert live.peak <= waiting + 2 * UNIT


def test_outputs_that_somebody_keeps_do_not_keep_the_graph() -> None:
    module = nn.Sequential(*(Layer() for _ in range(3))).double()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    live = Live()
    with live:
        y = module(x)
        left(SplitBackward("stage 0").begin([y], [torch.ones_like(y)], [x])).run()
        live.storages.pop(x.untyped_storage()._cdata, None)
    assert live.now() == 2 * UNIT  # y and x.grad
    del y


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_casts_of_weights_do_not_wait(kind: str) -> None:
    # Under autocast a layer saves the copy of its weight that it computed with; the weight's own gradient needs none.
    module = nn.Linear(256, 256) if kind == "linear" else nn.Conv2d(256, 256, 1)
    x = torch.randn((4, 256) if kind == "linear" else (1, 256, 2, 2), requires_grad=True)
    live = Live()
    with live, torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x).float()
    work = left(SplitBackward("stage 0").begin([y], [torch.ones_like(y)], [x]))
    assert live.now() == 0
    work.run()
    got, module.weight.grad = grad(module.weight), None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x).float()
    y.sum().backward()
    assert torch.equal(grad(module.weight), got)


class Sometimes(torch.autograd.Function):
    """Keeps a tensor for its backward, or doesn't: graphs of one structure."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor | None) -> Tensor:
        if kept is not None:
            ctx.save_for_backward(kept)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * 1, None


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    heads = x.view(1, 2, ROWS, WIDTH // 2)
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
    return attended.reshape(ROWS, WIDTH)


@pytest.mark.parametrize(("call", "shape"), [(Sometimes.apply, (ROWS, WIDTH)), (masked, (1, 1, 1, ROWS))])
def test_what_only_later_microbatches_save_is_freed_by_their_input_half_too(
    call: Callable[[Tensor, Tensor | None], Tensor], shape: tuple[int, ...]
) -> None:
    linear = nn.Linear(WIDTH, WIDTH).double()
    split = SplitBackward("stage 0")
    waiting = []
    for saves in (False, True, True):
        kept = torch.zeros(shape, dtype=torch.float64) if saves else None
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
        y = call(linear(x), kept)
        seen = None if kept is None else StorageWeakRef(kept.untyped_storage())
        del kept
        waiting.append(left(split.begin([gradient_edge(y)], [torch.ones_like(y)], [x])))
        del y
        assert seen is None or seen.expired()
    for work in waiting:
        work.run()


def test_hooks_that_pack_into_nothing_are_hooks() -> None:
    x = torch.randn(2, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: x):
        node = nn.functional.linear(x, nn.Parameter(torch.randn(3, WIDTH)), nn.Parameter(torch.randn(3))).grad_fn
    assert packed(node, names_of_saved(node, "Addmm")) is Packed.MAYBE
