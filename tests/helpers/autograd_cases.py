"""Hard cases for autograd across stage boundaries, and the same model without a pipeline, microbatch by microbatch.

`compare()` runs on every rank. It first makes all pipelined steps, then all steps of the reference, each from the same
seeds, and compares everything that a user can see of this rank's stage: gradients of parameters and inputs, buffers,
losses, outputs, and what hooks noted down.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from random_programs import one_rank
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

import pypipe

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


def _nothing(*_: Any) -> None:
    pass


@dataclasses.dataclass
class Case:
    """A model, its data, and what is done with it."""

    modules: list[nn.Module]
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
    after: Callable[[nn.Module, int], None] = _nothing  # with a stage's module, after each step
    whole: bool = False  # the reference runs the whole batch at once
    join: Callable[[list[Any]], Any] = lambda outputs: torch.cat(outputs)  # of the reference's outputs


class Join(nn.Module):
    """An ordinary stage that takes whatever the one before returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *xs: Any, **named: Any) -> Tensor:
        return torch.sin(self.linear(total((xs, named))))  # saves its input, so its output may change in place


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


def _setitem(self: Special, x: Tensor) -> Tensor:
    x[:, 0] = x[:, 1].clone() * self.p[0]
    return x


def _mul_and_save(self: Special, x: Tensor) -> Tensor:
    x.mul_(2)
    return x * self.p


def _through_a_view(self: Special, x: Tensor) -> Tensor:
    x.view(-1).mul_(2)
    x[:, 0].zero_()
    return x @ self.w


def _detach_in_place(self: Special, x: Tensor) -> Tensor:
    return x.detach_() @ self.w


class _SavedAsGradient(torch.autograd.Function):
    """Its backward returns what was saved, as it is, as the input's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0]


class _SavedAsParameterGradient(torch.autograd.Function):
    """Its backward returns a view of what was saved as the parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + parameter

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, ctx.saved_tensors[0][0]


class _OutputGradientAsGradient(torch.autograd.Function):
    """Its backward returns views of the gradient it got."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        return x + parameter

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient[0]


class _Doubler(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def _penalty(self: Special, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return x
    if not x.requires_grad:
        x = x.detach().requires_grad_()
    y = torch.tanh(self.linear(x))
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + slope


def _retain(self: Special, x: Tensor) -> Tensor:
    y = x @ self.w
    if not y.requires_grad:
        return y
    y.retain_grad()
    self.noted.append(y)
    return y


def _checkpoint(reentrant: bool) -> Callable[[Special, Tensor], Any]:
    def run(self: Special, x: Tensor) -> Any:
        return checkpoint.checkpoint(self.inner, x, use_reentrant=reentrant)

    return run


SPECIALS: dict[str, Callable[[Any, Tensor], Any]] = {
    "relu in place": lambda self, x: x.relu_() @ self.w,
    "an item assigned in place": _setitem,
    "multiplies its input in place and saves it": _mul_and_save,
    "changes its input through a view": _through_a_view,
    "changes its output in place": lambda self, x: (x @ self.w).mul_(self.p).relu_(),
    "detaches its input in place": _detach_in_place,
    "returns its input": lambda self, x: x,
    "returns its input twice": lambda self, x: (x, x),
    "returns its input and a product": lambda self, x: (x, x * self.p),
    "returns a view of its input": lambda self, x: x.view(-1).view(x.shape),
    "returns its input and views of it": lambda self, x: (x, x.view(-1).view(x.shape), x[:, :1], x.t().t()),
    "returns a transposed tensor": lambda self, x: (x @ self.w).t().contiguous().t(),
    "returns a slice with gaps": lambda self, x: (x @ self.w, torch.cat([x, x], 1)[:, ::2] * self.p),
    "returns an expanded tensor": lambda self, x: (x, (self.s * 2).expand(len(x), WIDTH)),
    "returns a parameter": lambda self, x: (x @ self.w, self.p),
    "returns only a parameter": lambda self, x: self.p,
    "returns a view of a parameter": lambda self, x: (x @ self.w, self.p.view(2, 2).view(WIDTH)),
    "returns a parameter plus 0": lambda self, x: (x @ self.w, self.p + 0),
    "returns a transposed parameter": lambda self, x: (x @ self.w, self.w.t().sum(0), self.w.t()[:1]),
    "returns a reshaped parameter twice": lambda self, x: (x, self.p.view(1, WIDTH), self.p.unsqueeze(0).squeeze(0)),
    "returns a parameter of one element": lambda self, x: (x @ self.w, self.s),
    "returns a view of a parameter of one element": lambda self, x: (x @ self.w, self.s.view(1, 1)),
    "ignores its input": lambda self, x: self.p.expand(len(x), WIDTH) * 2,
    "detaches its input": lambda self, x: x.detach() @ self.w,
    "returns an output that nobody uses": lambda self, x: (x @ self.w, self.linear(x).unsqueeze(1)),
    "returns a view that nobody uses": lambda self, x: (x @ self.w, x.unsqueeze(1), self.p.view(1, 2, 2)),
    "returns integers and flags too": lambda self, x: (x @ self.w, (x > 0).int(), x > 1, torch.tensor(3)),
    "a saved tensor as the input's gradient": lambda self, x: _SavedAsGradient.apply(x) * self.p,
    "a saved tensor as a parameter's gradient": lambda self, x: _SavedAsParameterGradient.apply(x, self.p),
    "views of the output's gradient as gradients": lambda self, x: _OutputGradientAsGradient.apply(x, self.p),
    "a custom function last": lambda self, x: _Doubler.apply(x @ self.w),
    "a custom function first": lambda self, x: _Doubler.apply(x) @ self.w,
    "a custom function alone": lambda self, x: _Doubler.apply(x),
    "a custom function without a gradient": lambda self, x: (_NoGradient.apply(x @ self.w), x * self.p),
    "only a custom function without a gradient": lambda self, x: _NoGradient.apply(x @ self.w),
    "a gradient penalty": _penalty,
    "retain_grad on the output": _retain,
    "checkpoint": _checkpoint(False),
    "checkpoint, reentrant": _checkpoint(True),
    "one module twice": lambda self, x: self.linear(torch.tanh(self.linear(x))),
    "no parameters in use": lambda self, x: torch.tanh(x) * 2,
    "batch norm": lambda self, x: self.norm(x @ self.w),
    "dropout": lambda self, x: self.drop(x @ self.w),
    "complex": lambda self, x: torch.complex(x, x @ self.w) * torch.complex(self.p, self.s.expand(WIDTH)),
    "complex and conjugate": lambda self, x: torch.complex(x, x @ self.w).conj(),
    "an imaginary part": lambda self, x: torch.complex(x, x @ self.w).conj().imag,
    "bfloat16": lambda self, x: (x @ self.w).bfloat16(),
    "float16": lambda self, x: ((x @ self.w).half(), self.p.half()),
    "float32 beside float64": lambda self, x: ((x @ self.w).float(), x),
    "float8 without a gradient": lambda self, x: (x @ self.w, x.detach().to(torch.float8_e4m3fn).float()),
    "an empty tensor": lambda self, x: (x @ self.w, (x @ self.w)[:0].unsqueeze(1)),
    "a number": lambda self, x: (x @ self.w, 1.5, None, "text", self.p.sum()),
    "dead relu": lambda self, x: (x @ self.w - 1e9).relu(),
    "no_grad inside": lambda self, x: x @ self.w.detach() + torch.no_grad()(self.linear)(x),
}


def special(name: str, place: int, size: int) -> Case:
    """One special stage at some place, ordinary ones around it."""
    modules: list[nn.Module] = [Join() for _ in range(size)]
    modules[place] = Special(SPECIALS[name])
    return Case(modules, join=_join_trees)


def _join_trees(outputs: list[Any]) -> Any:
    flat = [pytree.tree_flatten(output)[0] for output in outputs]
    joined = []
    for values in zip(*flat, strict=True):
        if not isinstance(values[0], Tensor):
            joined.append(values[-1])
        else:
            joined.append(torch.stack(values) if values[0].dim() == 0 else torch.cat(values))
    return pytree.tree_unflatten(joined, pytree.tree_flatten(outputs[0])[1])


# Where a special stage may stand, if not anywhere: plain PyTorch too would write such a gradient into the user's batch.
PLACES = {"a saved tensor as a parameter's gradient": [1, 2], "an optimizer in the backward": [0, 1]}

# --- Hooks: each prepares one stage's module; what they note is compared. ---


def _note(module: Any, gradient: Tensor | None) -> None:
    if gradient is not None:
        module.noted.append(gradient)


def _hook_on_the_output(self: Special, x: Tensor) -> Tensor:
    y = x @ self.w
    if y.requires_grad:
        y.register_hook(lambda gradient: _note(self, gradient))
    return y


def _hook_on_the_input(self: Special, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: _note(self, gradient))
    return x @ self.w


def _hook_that_changes(self: Special, x: Tensor) -> Tensor:
    y = x @ self.w
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 3)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y * self.p


def _parameter_hooks(module: Special) -> None:
    module.w.register_hook(lambda gradient: gradient * 2)
    module.p.register_hook(lambda gradient: _note(module, gradient))
    module.w.register_post_accumulate_grad_hook(lambda parameter: _note(module, parameter.grad.clone()))


def _full_backward_hooks(module: Special) -> None:
    def after(_: nn.Module, inputs: Any, outputs: Any) -> Any:
        for gradient in (*inputs, *outputs):
            _note(module, gradient if gradient is None else gradient.clone())
        return tuple(gradient if gradient is None else gradient * 2 for gradient in inputs)

    module.register_full_backward_hook(after)
    module.register_full_backward_pre_hook(lambda _, outputs: tuple(gradient * 3 for gradient in outputs))


def _keep_output_gradients(module: Special) -> None:
    def keep(_: nn.Module, inputs: Any, outputs: Any) -> None:
        for gradient in (*inputs, *outputs):
            _note(module, gradient)

    module.register_full_backward_hook(keep)


def _optimizer_in_backward(module: Special) -> None:
    def step(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def _take_gradients(module: Special) -> None:
    def take(parameter: nn.Parameter) -> None:
        _note(module, parameter.grad)
        parameter.grad = None

    module.p.register_post_accumulate_grad_hook(take)


def _scale_in_place(module: Special) -> None:
    def scale(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    module.p.register_post_accumulate_grad_hook(scale)


HOOKS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Special], None]]] = {
    "a hook keeps the output's gradient": (_hook_on_the_output, _nothing),
    "a hook keeps the input's gradient": (_hook_on_the_input, _nothing),
    "hooks change gradients": (_hook_that_changes, _nothing),
    "hooks of parameters": (lambda self, x: x @ self.w * self.p, _parameter_hooks),
    "full backward hooks": (lambda self, x: x @ self.w, _full_backward_hooks),
    "a full backward hook keeps gradients": (lambda self, x: x @ self.w, _keep_output_gradients),
    "an optimizer in the backward": (lambda self, x: (x @ self.w, self.p.view(1, WIDTH)), _optimizer_in_backward),
    "a hook takes the gradient away": (lambda self, x: (x @ self.w, self.p.view(1, WIDTH)), _take_gradients),
    "a hook takes the gradient of a plain parameter": (lambda self, x: (x @ self.w, self.p), _take_gradients),
    "a hook scales the gradient in place": (lambda self, x: (x @ self.w, self.p.view(1, WIDTH)), _scale_in_place),
    "weight norm": (
        lambda self, x: self.linear(x),
        lambda module: parametrizations.weight_norm(module.linear),
    ),
    "spectral norm": (
        lambda self, x: self.linear(x),
        lambda module: parametrizations.spectral_norm(module.linear),
    ),
    "a forward hook replaces the output": (
        lambda self, x: x @ self.w,
        lambda module: module.register_forward_hook(lambda _, args, output: output * module.p),
    ),
    "a forward hook that uses a weight": (
        lambda self, x: self.linear(x),
        lambda module: module.linear.register_forward_pre_hook(lambda _, args: (args[0] * module.p,)),
    ),
}


def hooked(name: str, place: int, size: int) -> Case:
    function, _ = HOOKS[name]
    modules: list[nn.Module] = [Join() for _ in range(size)]
    modules[place] = Special(function)
    # A step of an optimizer changes parameters that other microbatches' backwards still need.
    return Case(modules, join=_join_trees, n_microbatches=1 if "optimizer" in name else 3)


# --- Everything else: one case each. ---


class Named(nn.Module):
    """A stage with keyword arguments of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, *, scale: Any = None, shift: Any = None, flag: bool = False, deep: Any = None
    ) -> Tensor:
        y = self.linear(x)
        if scale is not None:
            y = y * scale
        if shift is not None:
            y = y + shift
        if deep is not None:
            y = y + deep["a"][0] * deep["b"]
        return -y if flag else torch.tanh(y)


class KeywordOnly(nn.Module):
    """A first stage whose batch comes by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.linear(x if y is None else x * y)


class Tokens(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, sparse=sparse)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class ArgMax(nn.Module):
    """Returns integers only: nothing upstream gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).argmax(1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y, torch.sin(y), (x > 0).double(), x.detach() * 3


class InPlaceTwo(nn.Module):
    """Saves one of its inputs for backward and changes the others in place."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(WIDTH))

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
        kept = a * self.p + d * self.p
        b.mul_(2).relu_()
        c.add_(1)
        return kept + b, c


class Swap(nn.Module):
    """Returns what it got, in another order, and one of it twice."""

    def forward(self, *xs: Tensor) -> Any:
        return (*reversed(xs), xs[0])


class Frozen(Join):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Plain(nn.Module):
    """Holds a leaf that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> Any:
        return x, self.extra.view(1, WIDTH)


def joins(count: int) -> list[nn.Module]:
    return [Join() for _ in range(count)]


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def _x_leaf(size: int) -> Case:
    return Case(joins(size), batch=lambda step: plain_batch(args=(_leaf(7, WIDTH),)))


def _x_with_a_graph(size: int) -> Case:
    def batch(step: int) -> Batch:
        leaf = _leaf(7, WIDTH)
        return plain_batch(args=(torch.tanh(leaf * 2) * leaf,), leaves={0: [leaf]})

    return Case(joins(size), batch=batch, whole=True)


def _x_with_a_graph_in_place(size: int) -> Case:
    def batch(step: int) -> Batch:
        leaf = _leaf(7, WIDTH)
        return plain_batch(args=(leaf * 2,), leaves={0: [leaf]})

    return Case([Special(SPECIALS["relu in place"]), *joins(size - 1)], batch=batch, whole=True)


def _x_twice(size: int) -> Case:
    def batch(step: int) -> Batch:
        leaf = _leaf(7, WIDTH)
        x = leaf * 2
        return plain_batch(args=(x, x), kwargs={0: {"again": x}}, leaves={0: [leaf]})

    return Case(joins(size), batch=batch, whole=True)


def _x_is_target(size: int) -> Case:
    def batch(step: int) -> Batch:
        x = torch.randn(7, WIDTH, dtype=torch.float64)
        return Batch((x,), x)

    return Case(joins(size), batch=batch)


def _keyword_gradients(size: int) -> Case:
    def batch(step: int) -> Batch:
        return plain_batch(
            kwargs={
                stage: {"scale": _leaf(7, WIDTH), "shift": _leaf(7, 1), "flag": stage == 1} for stage in range(size)
            }
        )

    return Case([Named() for _ in range(size)], batch=batch)


def _replicated_keyword_gradients(size: int) -> Case:
    specs = {"shift": pypipe.Replicate(), "scale": pypipe.Replicate()}

    def batch(step: int) -> Batch:
        return plain_batch(kwargs={stage: {"shift": _leaf(1, WIDTH), "scale": _leaf(1)} for stage in range(size)})

    return Case([Named() for _ in range(size)], batch=batch, schedule_kwargs={"kwargs_chunk_spec": specs})


def _nested_keywords(size: int) -> Case:
    def batch(step: int) -> Batch:
        return plain_batch(
            kwargs={
                stage: {
                    "deep": {"a": [_leaf(7, WIDTH), "text"], "b": torch.randn(7, 1, dtype=torch.float64), "c": None}
                }
                for stage in range(size)
            }
        )

    return Case([Named() for _ in range(size)], batch=batch)


def _keywords_of_one_stage(size: int) -> Case:
    def batch(step: int) -> Batch:
        return plain_batch(kwargs={size - 1: {"shift": torch.randn(7, WIDTH, dtype=torch.float64), "flag": True}})

    return Case([Named() for _ in range(size)], batch=batch)


def _keywords_only(size: int) -> Case:
    def batch(step: int) -> Batch:
        return plain_batch(args=(), kwargs={0: {"x": _leaf(7, WIDTH), "y": torch.randn(7, WIDTH, dtype=torch.float64)}})

    return Case([KeywordOnly(), *joins(size - 1)], batch=batch)


def _chunked_along_another_dimension(size: int) -> Case:
    class Transposes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.linear(x.t()) + table

    def batch(step: int) -> Batch:
        return plain_batch(args=(_leaf(WIDTH, 7), _leaf(WIDTH)))

    specs = (pypipe.TensorChunkSpec(1), pypipe.Replicate())
    return Case([Transposes(), *joins(size - 1)], batch=batch, schedule_kwargs={"args_chunk_spec": specs})


def _target_gradients(size: int) -> Case:
    def batch(step: int) -> Batch:
        leaf = _leaf(7, WIDTH)
        return plain_batch(target=leaf * 2 if step else leaf, leaves={size - 1: [leaf]})

    return Case(joins(size), batch=batch, whole=True)


def _nested_target(size: int) -> Case:
    def batch(step: int) -> Batch:
        return plain_batch(target={"y": torch.randn(7, WIDTH, dtype=torch.float64), "more": [_leaf(7, 1)]})

    return Case(joins(size), batch=batch)


def _flat_target(size: int) -> Case:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output.flatten(), target)

    return Case(
        joins(size), batch=lambda step: plain_batch(target=torch.randn(7 * WIDTH, dtype=torch.float64)), loss=loss
    )


def _tokens(sparse: bool) -> Callable[[int], Case]:
    def make(size: int) -> Case:
        return Case(
            [Tokens(sparse), *joins(size - 1)],
            batch=lambda step: plain_batch(args=(torch.randint(9, (7,)),)),
        )

    return make


def _sparse_in_the_middle(size: int) -> Case:
    modules = [ArgMax(), Tokens(True), *joins(size - 2)]
    return Case(modules[:size])


def _integers_only(size: int) -> Case:
    return Case([ArgMax(), Tokens(), *joins(size - 2)])


def _frozen(*stages: int) -> Callable[[int], Case]:
    def make(size: int) -> Case:
        return Case([Frozen() if stage in stages else Join() for stage in range(size)])

    return make


def _frozen_with_x_gradient(size: int) -> Case:
    return Case([Frozen() for _ in range(size)], batch=lambda step: plain_batch(args=(_leaf(7, WIDTH),)))


def _autocast(size: int) -> Case:
    modules = [Special(SPECIALS["one module twice"]) for _ in range(size)]

    def batch(step: int) -> Batch:
        return Batch((torch.randn(7, WIDTH),), torch.randn(7, WIDTH))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    # With two microbatches sums have one order, so everything is equal to the bit.
    return Case(
        [module.float() for module in modules], batch=batch, loss=loss, n_microbatches=2, tolerance=0.0, double=False,
        around=lambda: torch.autocast("cpu", torch.bfloat16),
    )  # fmt: skip


def _autocast_checkpoint(size: int) -> Case:
    case = _autocast(size)
    case.modules = [Special(_checkpoint(stage == 1)).float() for stage in range(size)]
    return case


def _autocast_with_a_graph_behind(size: int) -> Case:
    case = _autocast(size)

    def batch(step: int) -> Batch:
        leaf = torch.randn(7, WIDTH).requires_grad_()
        weight = torch.randn(WIDTH, WIDTH).requires_grad_()
        return Batch((leaf @ weight,), torch.randn(7, WIDTH), leaves={0: [leaf, weight]})

    case.batch = batch
    case.steps = 1
    case.tolerance = 1e-5  # the graph behind x is walked once, not once for each microbatch
    return case


def _bfloat16(size: int) -> Case:
    def batch(step: int) -> Batch:
        return Batch((torch.randn(6, WIDTH).bfloat16(),), torch.randn(6, WIDTH).bfloat16(), rows=6)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).bfloat16() for _ in range(size)]
    return Case(modules, batch=batch, loss=loss, n_microbatches=2, steps=1, tolerance=0.0, double=False)


def _clip(size: int) -> Case:
    def after(module: nn.Module, step: int) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        nn.utils.clip_grad_value_(module.parameters(), 0.005)

    return Case(joins(size), after=after)


def _train(size: int) -> Case:
    optimizers: dict[int, Any] = {}

    def after(module: nn.Module, step: int) -> None:
        if id(module) not in optimizers:
            optimizers[id(module)] = (module, torch.optim.SGD(module.parameters(), 0.1, momentum=0.9))
        optimizers[id(module)][1].step()
        optimizers[id(module)][1].zero_grad(set_to_none=step % 2 == 0)

    return Case(joins(size), after=after, steps=4)


def _scaled_loss(size: int) -> Case:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss(output: Any, target: Tensor) -> Tensor:
        return scaler.scale(mse(output, target))

    return Case(joins(size), loss=loss)


def _loss_kwargs(size: int) -> Case:
    def loss(output: Any, target: Tensor, *, power: int, weights: Tensor) -> Tensor:
        return ((output - target).abs() ** power * weights).mean()

    kwargs = {"power": 3, "weights": torch.arange(4.0, dtype=torch.float64)}
    return Case(joins(size), loss=loss, loss_kwargs=kwargs)


def _loss_of_shape_one(size: int) -> Case:
    return Case(joins(size), loss=lambda output, target: mse(output, target).view(1))


def _loss_with_a_parameter(size: int) -> Case:
    """The loss adds a parameter as it is: autograd may make the very tensor that backward starts from its gradient."""
    modules = [*joins(size - 1), Special(lambda self, x: (x @ self.w, self.s.unsqueeze(0).unsqueeze(0)))]

    def loss(output: Any, target: Tensor) -> Tensor:
        return mse(output[0], target) + output[1].squeeze()

    return Case(modules, loss=loss, steps=3, join=_join_trees)


def _loss_is_an_input(size: int) -> Case:
    """The last stage gets a loss and returns it."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).square().mean()

    class Identity(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    modules: list[nn.Module] = [*joins(size - 2), Loss(), Identity()]
    return Case(modules, loss=lambda output, target: output, join=torch.stack)


def _uneven_weights(size: int) -> Case:
    return Case(joins(size), n_microbatches=4, batch=lambda step: plain_batch([7, 9, 4][step]), steps=3, whole=True)


def _sums(size: int) -> Case:
    def loss(output: Any, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target, reduction="sum")

    return Case(joins(size), loss=loss, scale_grads=False, whole=True)


def _merge_spec(size: int) -> Case:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            return {"t": y.t(), "n": len(x), "sum": y.sum()}

    spec = {"t": pypipe.TensorChunkSpec(1), "n": pypipe.Reduce(0, lambda a, b: a + b), "sum": None}

    def join(outputs: list[Any]) -> Any:
        return {
            "t": torch.cat([output["t"] for output in outputs], 1),
            "n": sum(output["n"] for output in outputs),
            "sum": torch.stack([output["sum"] for output in outputs]),
        }

    return Case(
        [*joins(size - 1), Last()], loss=lambda output, target: mse(output["t"].t(), target), join=join,
        schedule_kwargs={"output_merge_spec": spec},
    )  # fmt: skip


def _batch_norm_in_eval(size: int) -> Case:
    modules = [Special(SPECIALS["batch norm"]).eval() for _ in range(size)]
    return Case(modules)


def _leaf_that_is_no_parameter(size: int) -> Case:
    return Case([Plain(), *joins(size - 1)])


def _in_place_beside_saved(size: int) -> Case:
    return Case([Two(), InPlaceTwo(), *joins(size - 2)])


def _swaps(size: int) -> Case:
    return Case([Two(), *[Swap() for _ in range(size - 1)]], join=_join_trees)


def _shapes_change(size: int) -> Case:
    return Case(joins(size), batch=lambda step: plain_batch([7, 3, 8, 5][step]), steps=4)


CASES: dict[str, Callable[[int], Case]] = {
    "plain": lambda size: Case(joins(size), whole=True),
    "one microbatch": lambda size: Case(joins(size), n_microbatches=1),
    "as many microbatches as rows": lambda size: Case(joins(size), n_microbatches=7),
    "uneven microbatches, each weighted by its rows": _uneven_weights,
    "plain sums": _sums,
    "other batch sizes": _shapes_change,
    "x is a leaf": _x_leaf,
    "x has a graph behind it": _x_with_a_graph,
    "x has a graph behind it and is changed in place": _x_with_a_graph_in_place,
    "x is given twice": _x_twice,
    "x is the target": _x_is_target,
    "keywords that need gradients": _keyword_gradients,
    "keywords for all microbatches that need gradients": _replicated_keyword_gradients,
    "nested keywords": _nested_keywords,
    "keywords of one stage": _keywords_of_one_stage,
    "keywords only": _keywords_only,
    "arguments cut along another dimension": _chunked_along_another_dimension,
    "a target that needs a gradient": _target_gradients,
    "a nested target": _nested_target,
    "a flattened target": _flat_target,
    "tokens": _tokens(False),
    "a sparse embedding": _tokens(True),
    "a sparse embedding in the middle": _sparse_in_the_middle,
    "a stage that returns integers only": _integers_only,
    "first stage frozen": _frozen(0),
    "first stages frozen": _frozen(0, 1),
    "last stage frozen": _frozen(2),
    "last stages frozen": _frozen(1, 2),
    "middle stage frozen": _frozen(1),
    "all frozen but x": _frozen_with_x_gradient,
    "autocast": _autocast,
    "autocast with checkpoints": _autocast_checkpoint,
    "autocast with a graph behind x": _autocast_with_a_graph_behind,
    "bfloat16 throughout": _bfloat16,
    "clipped gradients": _clip,
    "an optimizer": _train,
    "a scaled loss": _scaled_loss,
    "loss_kwargs": _loss_kwargs,
    "a loss of shape (1,)": _loss_of_shape_one,
    "a loss with a parameter in it": _loss_with_a_parameter,
    "a loss that comes from the stage before": _loss_is_an_input,
    "output_merge_spec": _merge_spec,
    "batch norm in eval mode": _batch_norm_in_eval,
    "a leaf that is no parameter": _leaf_that_is_no_parameter,
    "inputs changed in place beside one that is saved": _in_place_beside_saved,
    "stages that only pass on": _swaps,
}


# --- The runs. ---


def _copy(value: Any) -> Any:
    def copy(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to_dense().clone() if tensor.is_sparse else tensor.clone()

    return pytree.tree_map_only(Tensor, copy, value)


def _visible(module: nn.Module, stage: int, size: int, batch: Batch) -> dict[str, Any]:
    """What a user can see of a stage after a step."""
    seen: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        seen[f"gradient of {name}"] = parameter.grad
        seen[f"parameter {name}"] = parameter
    for name, buffer in module.named_buffers():
        seen[f"buffer {name}"] = buffer
    if isinstance(module, Plain):
        seen["gradient of the plain leaf"] = module.extra.grad
    noted = getattr(module, "noted", [])
    for i, tensor in enumerate(noted):
        seen[f"note {i}"] = tensor.grad if tensor.requires_grad else tensor
    trees = [batch.kwargs.get(stage)] + [batch.args] * (stage == 0) + [batch.target] * (stage == size - 1)
    leaves = [x for x in pytree.tree_leaves(trees) if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]
    for i, leaf in enumerate(leaves + batch.leaves.get(stage, [])):
        seen[f"gradient of batch leaf {i}"] = leaf.grad
    return _copy(seen)


def _build(make: Callable[[], Case], prepare: Callable[[Any], None]) -> Case:
    torch.manual_seed(0)
    case = make()
    if case.double:
        for module in case.modules:
            module.double()
    for module in case.modules:
        if isinstance(module, Special):
            prepare(module)
    return case


def _held(rank: int, size: int, group: Any, name: str, case: Case) -> tuple[dict[int, nn.Module], Any]:
    """This rank's modules by their stage, and a schedule for them; on one rank there may be several stages."""
    count = len(case.modules)
    held = {stage: case.modules[stage] for stage in ([rank] if size == count else range(count))}
    stages = [
        pypipe.PipelineStage(module, stage, count, torch.device("cpu"), group=group) for stage, module in held.items()
    ]
    options = {"loss_fn": case.loss, "scale_grads": case.scale_grads, "timeout": 10, **case.schedule_kwargs}
    if size == count:
        return held, getattr(pypipe, name)(stages[0], n_microbatches=case.n_microbatches, **options)
    program = one_rank(count, case.n_microbatches, split=name == "I and W")
    return held, pypipe.Schedule(program, stages, case.n_microbatches, **options)


def _with_random_numbers_of_its_own(module: nn.Module, stage: int) -> None:
    """Stages on one rank draw from streams of their own, as stages on several ranks do."""
    torch.manual_seed(1000 + stage)
    states = [torch.get_rng_state()]

    def exchange(*_: Any) -> None:
        states.append(torch.get_rng_state())
        torch.set_rng_state(states.pop(0))

    module.register_forward_pre_hook(exchange)
    module.register_forward_hook(exchange)


def _pipelined(rank: int, size: int, group: Any, schedule_name: str, case: Case) -> list[dict[int, dict[str, Any]]]:
    """What is to be seen of each of this rank's stages after each step."""
    held, schedule = _held(rank, size, group, schedule_name, case)
    count = len(case.modules)
    for stage, module in held.items():
        _with_random_numbers_of_its_own(module, stage)
    seen: list[dict[int, dict[str, Any]]] = []
    with schedule:
        for step in range(case.steps):
            torch.manual_seed(100 + step)
            batch = case.batch(step)
            losses: list[Tensor] = []
            kwargs = {name: value for stage in held for name, value in batch.kwargs.get(stage, {}).items()}
            with case.around():
                output = schedule.step(
                    *batch.args, target=batch.target, losses=losses, loss_kwargs=case.loss_kwargs, **kwargs
                )
            seen.append({})
            for stage, module in held.items():
                case.after(module, step)
                results = {"losses": _copy(losses), "output": _copy(output)}
                if stage < count - 1 and count > size:
                    results = {"losses": [], "output": None}
                seen[-1][stage] = {**_visible(module, stage, count, batch), **results}
        schedule.eval(*batch.args, **kwargs)
        # Whatever arrived in the slots since must not have changed what the user holds.
        seen.append({})
        for stage, module in held.items():
            visible = _visible(module, stage, count, batch)
            seen[-1][stage] = {key: value for key, value in visible.items() if "note" in key or "grad" in key}
    return seen


def _split(case: Case, batch: Batch, size: int) -> list[tuple[Any, list[Any], Any]]:
    from torch.distributed.pipelining import microbatch as peer

    count = case.n_microbatches
    specs = case.schedule_kwargs

    def spec(values: Any, given: Any) -> Any:
        def one(value: Any, dim: Any) -> Any:
            if isinstance(dim, pypipe.Replicate) or not isinstance(value, Tensor) or value.dim() == 0:
                return peer._Replicate()
            return peer.TensorChunkSpec(dim.split_dim if dim else 0)

        if given is None:
            return pytree.tree_map(lambda value: one(value, None), values)
        if isinstance(values, dict):
            return {key: one(value, given.get(key)) for key, value in values.items()}
        return tuple(one(value, dim) for value, dim in zip(values, given, strict=True))

    args_spec = spec(batch.args, specs.get("args_chunk_spec"))
    if batch.args:
        args, _ = peer.split_args_kwargs_into_chunks(batch.args, {}, count, args_spec, {})
    else:
        args = [()] * count
    kwargs: list[list[Any]] = [[{}] * size for _ in range(count)]
    for stage, named in batch.kwargs.items():
        named_spec = spec(named, specs.get("kwargs_chunk_spec"))
        _, chunks = peer.split_args_kwargs_into_chunks(
            (torch.empty(count),), named, count, (peer.TensorChunkSpec(0),), named_spec
        )
        for microbatch, chunk in enumerate(chunks):
            kwargs[microbatch] = [*kwargs[microbatch][:stage], chunk, *kwargs[microbatch][stage + 1 :]]
    rows = batch.rows
    sizes = [len(chunk) for chunk in torch.tensor_split(torch.empty(rows), count)]
    columns = [torch.split(leaf, [n * (len(leaf) // rows) for n in sizes]) for leaf in pytree.tree_leaves(batch.target)]
    structure = pytree.tree_flatten(batch.target)[1]
    targets = [pytree.tree_unflatten(list(chunk), structure) for chunk in zip(*columns, strict=True)]
    return list(zip(args, kwargs, targets, strict=True))


def _reference(rank: int, size: int, case: Case, backwards_in_reverse: bool) -> list[dict[str, Any]]:
    rngs = []
    for stage in range(size):
        torch.manual_seed(1000 + stage)
        rngs.append(torch.get_rng_state())

    def forward(args: Any, kwargs: list[Any]) -> Any:
        value: Any = tuple(x.clone() if isinstance(x, Tensor) and not x.requires_grad else x for x in args)
        for stage, module in enumerate(case.modules):
            torch.set_rng_state(rngs[stage])
            value = module(*value, **kwargs[stage]) if isinstance(value, tuple) else module(value, **kwargs[stage])
            rngs[stage] = torch.get_rng_state()
        return value

    seen: list[dict[str, Any]] = []
    for step in range(case.steps):
        torch.manual_seed(100 + step)
        batch = case.batch(step)
        rows = batch.rows
        shares = [len(chunk) / rows for chunk in torch.tensor_split(torch.empty(rows), case.n_microbatches)]
        losses: list[Tensor] = []
        outputs: list[Any] = []
        pieces = _split(case, batch, size)
        if case.whole:
            clone = pytree.tree_map_only(Tensor, lambda x: x if x.requires_grad else x.clone(), pieces)
            with case.around(), torch.no_grad():
                for args, kwargs, target in clone:
                    args = pytree.tree_map_only(Tensor, torch.clone, args)
                    outputs.append(forward(args, kwargs))
                    losses.append(case.loss(outputs[-1], target, **(case.loss_kwargs or {})))
            with case.around():
                whole = forward(batch.args, [batch.kwargs.get(stage, {}) for stage in range(size)])
                loss = case.loss(whole, batch.target, **(case.loss_kwargs or {}))
            loss.backward()
        else:
            graphs = []
            for args, kwargs, target in pieces:
                with case.around():
                    output = forward(args, kwargs)
                    loss = case.loss(output, target, **(case.loss_kwargs or {}))
                outputs.append(_copy(output))
                losses.append(loss.detach().clone())
                graphs.append(loss)
            del output, loss
            backwards = list(zip(shares, graphs, strict=True))
            for share, loss in reversed(backwards) if backwards_in_reverse else backwards:
                start = torch.full_like(loss, share if case.scale_grads else 1.0)
                loss.backward(start, retain_graph=bool(batch.leaves))
        case.after(case.modules[rank], step)
        for stage, module in enumerate(case.modules):
            if stage != rank:
                case.after(module, step)
        last = rank == size - 1
        seen.append(
            {
                **_visible(case.modules[rank], rank, size, batch),
                "losses": _copy(losses) if last else [],
                "output": _copy(case.join(outputs)) if last else None,
            }
        )
    seen.append({key: value for key, value in seen[-1].items() if "note" in key or "grad" in key})
    return seen


def _worst(a: Any, b: Any) -> float:
    """The largest difference, relative to the largest value."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return 0.0 if a == b else float("inf")
    if a.dtype != b.dtype or a.shape != b.shape:
        return float("inf")
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.flatten()[:4].tolist()}"
    return repr(value)


def _differences(name: str, case: Case, mine: dict[str, Any], theirs: dict[str, Any], out: list[str]) -> None:
    if list(mine) != list(theirs):
        out.append(f"{name}: only one of the runs has {set(mine) ^ set(theirs)}")
    for key in mine.keys() & theirs.keys():
        a, a_spec = pytree.tree_flatten(mine[key])
        b, b_spec = pytree.tree_flatten(theirs[key])
        if a_spec != b_spec:
            out.append(f"{name}: {key} is {_show(mine[key])} instead of {_show(theirs[key])}")
            continue
        for x, y in zip(a, b, strict=True):
            worst = _worst(x, y)
            if not worst <= case.tolerance:
                out.append(f"{name}: {key} differs by {worst:.3g}: {_show(x)} instead of {_show(y)}")


def compare(
    rank: int,
    size: int,
    group: Any,
    kind: str,
    name: str,
    places: list[int],
    schedules: list[str],
    link: str,
    count: int | None = None,
) -> list[str]:
    """What differs, in words, for a case at several places, with several schedules, over one link.

    `count` stages are on one rank, where it is given; then the schedules are "B" and "I and W".
    """
    count = count or size
    warnings.simplefilter("ignore")
    found: list[str] = []
    for place in places:
        for schedule in schedules:

            def make(place: int = place) -> Case:
                if kind == "special":
                    return special(name, place, count)
                return hooked(name, place, count) if kind == "hook" else CASES[name](count)

            prepare = HOOKS[name][1] if kind == "hook" else _nothing
            where = f"rank {rank}, {schedule}" + (f", special stage {place}" if kind != "case" else "")
            os.environ["PYPIPE_LINK"] = link
            try:
                mine = _pipelined(rank, size, group, schedule, _build(make, prepare))
            except Exception:
                # The other ranks fail too and go on to the next place, as this one does.
                found.append(f"{where}: the pipelined run raised\n{traceback.format_exc(limit=-3)}")
                continue
            finally:
                del os.environ["PYPIPE_LINK"]
            for stage in mine[0]:
                case = _build(make, prepare)
                theirs = _reference(stage, count, case, schedule == "ScheduleGPipe")
                for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                    when = f"step {step}" if step < case.steps else "after a later eval()"
                    _differences(f"{where}, stage {stage}, {when}", case, a[stage], b, found)
    return found


def compare_compiled(rank: int, size: int, group: Any) -> list[str]:
    """One stage is compiled; what differs from the same stages in eager mode."""
    found: list[str] = []
    runs = []
    for compiled in (True, False):
        torch.manual_seed(0)
        modules = joins(size)
        for module in modules:
            module.double()
        module: Any = modules[rank]
        called = torch.compile(module, backend="inductor") if compiled and rank == 1 else module
        stage = pypipe.PipelineStage(called, rank, size, torch.device("cpu"), group=group)
        with pypipe.Schedule1F1B(stage, n_microbatches=2, loss_fn=mse, timeout=100) as schedule:
            for _ in range(2):
                batch = plain_batch(6)
                schedule.step(*batch.args, target=batch.target)
        runs.append({name: parameter.grad for name, parameter in module.named_parameters()})
    _differences(f"rank {rank}", Case([]), *runs, found)
    return found


def evaluate(rank: int, size: int, group: Any, order: str, mode: str) -> list[str]:
    """Training steps with an eval() somewhere; what differs from the same steps without it, or from the model."""
    found: list[str] = []
    torch.manual_seed(0)
    modules = [module.double() for module in joins(size)]
    modules[1] = Special(lambda self, x: (self.norm(x) @ self.w, x, self.p.view(1, WIDTH))).double()
    reference = copy.deepcopy(modules)
    stage = pypipe.PipelineStage(modules[rank], rank, size, torch.device("cpu"), group=group)
    around = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, contextlib.nullcontext)
    batches = [plain_batch(7) for _ in range(2)]
    other = plain_batch(6)

    def model(modules: list[nn.Module], x: Tensor) -> Tensor:
        for module in modules:
            x = module(*x) if isinstance(x, tuple) else module(x)
        return x

    def evaluate_once() -> None:
        before = {name: parameter.grad for name, parameter in modules[rank].named_parameters()}
        kept = _copy(before)
        if mode == "module.eval()":
            modules[rank].eval()
        losses: list[Tensor] = []
        with around():
            output = schedule.eval(*other.args, target=other.target, losses=losses)
        modules[rank].train()
        after = {name: parameter.grad for name, parameter in modules[rank].named_parameters()}
        if any(after[name] is not before[name] for name in before):
            found.append(f"rank {rank}: eval() replaced a gradient")
        _differences(f"rank {rank}, gradients after eval()", Case([]), _copy(after), kept, found)
        if rank == size - 1:
            expected, expected_losses = [], []
            for module in reference:
                module.train(mode != "module.eval()")
            with torch.no_grad():
                for x, y in zip(torch.tensor_split(other.args[0], 3), torch.tensor_split(other.target, 3), strict=True):
                    expected.append(model(reference, x))
                    expected_losses.append(mse(expected[-1], y))
            for module in reference:
                module.train()
            _differences(
                f"rank {rank}, eval()", Case([]), {"output": output, "losses": losses},
                {"output": torch.cat(expected), "losses": expected_losses}, found,
            )  # fmt: skip
            if output.requires_grad or (mode != "inference_mode" and output.is_inference()):
                found.append("the output of eval() is no plain tensor")
        elif output is not None or losses:
            found.append(f"rank {rank} got an output")

    with pypipe.Schedule1F1B(stage, n_microbatches=3, loss_fn=mse, timeout=10) as schedule:
        for step, batch in enumerate(batches):
            if order == "eval first" or (order == "eval between" and step):
                evaluate_once()
            schedule.step(*batch.args, target=batch.target)
            for x, y in zip(torch.tensor_split(batch.args[0], 3), torch.tensor_split(batch.target, 3), strict=True):
                mse(model(reference, x), y).backward(torch.tensor(len(x) / 7, dtype=torch.float64))
        if order == "eval last":
            evaluate_once()
            evaluate_once()
    mine = {name: parameter.grad for name, parameter in modules[rank].named_parameters()}
    theirs = {name: parameter.grad for name, parameter in reference[rank].named_parameters()}
    _differences(f"rank {rank}", Case([]), _copy(mine), _copy(theirs), found)
    return found
