"""Hooks of every kind: each prepares one stage's module, and what they note is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from autograd_base import WIDTH, Case, Join, Special, join_trees, nothing
from gradients import grad
from torch import Tensor, nn
from torch.nn.utils import parametrizations


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


def _hook_of_an_accumulated_gradient(module: Special) -> None:
    module.w.register_post_accumulate_grad_hook(lambda parameter: _note(module, grad(parameter).clone()))


def _full_backward_hooks(module: Special) -> None:
    def before(_: nn.Module, outputs: Any) -> Any:
        return tuple(gradient * 3 for gradient in outputs)

    def after(_: nn.Module, inputs: Any, outputs: Any) -> Any:
        for gradient in (*inputs, *outputs):
            _note(module, gradient if gradient is None else gradient.clone())
        return tuple(gradient if gradient is None else gradient * 2 for gradient in inputs)

    module.register_full_backward_hook(after)
    module.register_full_backward_pre_hook(before)


def _keep_output_gradients(module: Special) -> None:
    def keep(_: nn.Module, inputs: Any, outputs: Any) -> None:
        for gradient in (*inputs, *outputs):
            _note(module, gradient)

    module.register_full_backward_hook(keep)


def _optimizer_in_backward(module: Special) -> None:
    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * grad(parameter)
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
        grad(parameter).mul_(0.5)

    module.p.register_post_accumulate_grad_hook(scale)


HOOKS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Special], object]]] = {
    "a hook keeps the output's gradient": (_hook_on_the_output, nothing),
    "a hook keeps the input's gradient": (_hook_on_the_input, nothing),
    "hooks change gradients": (_hook_that_changes, nothing),
    "hooks of parameters": (lambda self, x: x @ self.w * self.p, _parameter_hooks),
    "a hook of an accumulated gradient": (lambda self, x: x @ self.w * self.p, _hook_of_an_accumulated_gradient),
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
    # The reference runs a backward for each microbatch, the pipeline hooks of accumulated gradients once a step.
    once = ("optimizer", "accumulated", "takes", "scales")
    return Case(modules, join=join_trees, n_microbatches=1 if any(word in name for word in once) else 3)
