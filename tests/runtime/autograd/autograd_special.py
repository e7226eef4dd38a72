"""Stages that do something unusual to autograd, to stand first, in the middle or last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from autograd_base import WIDTH, Case, Join, Special, join_trees
from torch import Tensor, nn
from torch.utils import checkpoint


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


def checkpointed(reentrant: bool) -> Callable[[Special, Tensor], Any]:
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
    "checkpoint": checkpointed(False),
    "checkpoint, reentrant": checkpointed(True),
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
    return Case(modules, join=join_trees)


# Where a special stage may stand, if not anywhere: plain PyTorch too would write such a gradient into the user's batch.
PLACES = {"a saved tensor as a parameter's gradient": [1, 2], "an optimizer in the backward": [0, 1]}
