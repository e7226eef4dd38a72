"""Calling the loss function, and what a backward starts from.

An ordinary loss function returns a loss with a graph, from which a backward goes on into the stage. Another one runs
its own backward: it detaches the output, walks its own graph piece by piece so that the whole of it is never alive,
leaves the gradient on the output, and returns a number (chunked cross entropy). That gradient is meant to go on into
the stage, but in this microbatch's backward, which comes later.

So the first microbatch's loss is computed on a cut: on leaves with the output's values, on which gradients gather
without going on. If the function leaves some there, it gets leaves ever after. Else it gets the output itself, which
saves an engine run a microbatch. Meanwhile `.grad` of the stage's parameters is set aside, for the function's backward
may use them too (a head in the last stage): what has come there is weighted as the rest is, or taken back if the loss
is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pypipe.errors import InputError
from pypipe.runtime.autograd.engine import enter, gradient_edge, run_backward
from pypipe.runtime.batch.structure import map_tensors

__all__ = ["Losses"]

Roots = tuple[list[Any], list[Tensor]]
"""What a backward starts from: tensors or gradient edges, and a gradient for each."""


class _Cut:
    """One output tensor, cut off from its stage."""

    __slots__ = ("edge", "inside", "leaf")

    def __init__(self, tensor: Tensor) -> None:
        self.edge = gradient_edge(tensor)
        self.leaf = tensor.detach().requires_grad_()
        self.inside = enter(self.leaf)  # what the loss function gets: it may change it in place
        self.inside.retain_grad()  # else to look at its `.grad` is a warning

    def take(self) -> Tensor | None:
        """The gradient that has gathered, or that was put there as `.grad`."""
        gradient, self.leaf.grad = self.leaf.grad, None
        if gradient is None:
            gradient = self.inside.grad
        self.inside.grad = None
        if self.inside._version:  # else autograd would not see that what the stage has saved is changed
            torch.autograd.graph.increment_version(self.leaf)
        return gradient


class _Pending:
    """A microbatch between its forward and its backward."""

    __slots__ = ("cuts", "gradients", "loss")

    def __init__(self, loss: Tensor | None, cuts: list[_Cut], gradients: list[Tensor | None]) -> None:
        self.loss = loss
        self.cuts = cuts
        self.gradients = gradients  # those that the loss function has left on the cuts


class _SetAside:
    """`.grad` of parameters, while the loss function runs."""

    def __init__(self, modules: list[nn.Module]) -> None:
        parameters = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
        self._before = [(parameter, parameter.grad) for parameter in parameters.values()]
        for parameter, _ in self._before:
            parameter.grad = None

    def add(self, weight: float) -> bool:
        """Puts what there was back, with what has come weighted; returns whether anything has."""
        found = False
        for parameter, before in self._before:
            new = parameter.grad
            if new is None:
                parameter.grad = before
                continue
            found = True
            new = new if weight == 1.0 else new * weight
            parameter.grad = new if before is None else before + new
        return found

    def take_back(self) -> None:
        """Puts what there was back."""
        for parameter, before in self._before:
            parameter.grad = before


class Losses:
    """The losses of the last stage.

    Args:
        function: the loss function.
        module: the stage's module.
        where: how messages call the stage.
        weighs: whether microbatches are weighted by their share of the batch.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module, where: str, *, weighs: bool) -> None:
        self._function = function
        self._modules = [module, function] if isinstance(function, nn.Module) else [module]
        self._where = where
        self._weighs = weighs
        self._runs_backward: bool | None = None  # by itself; None: not known yet
        self._pending: dict[int, _Pending] = {}
        self._weights: dict[tuple[Any, ...], Tensor] = {}

    def reset(self) -> None:
        """Forgets the microbatches of a step."""
        self._pending = {}

    def compute(
        self,
        microbatch: int,
        output: Any,
        target: Any,
        options: dict[str, Any],
        weight: Callable[[], float] | None,
    ) -> Tensor:
        """Calls the loss function.

        Args:
            microbatch: whose output it is.
            output, target: what the function is called with.
            options: its keyword arguments.
            weight: tells the microbatch's weight in the batch's loss; None: no backward will follow.

        Returns:
            The loss, detached; one element.

        Raises:
            InputError: the loss is not a tensor of one element, or no gradient can be had of it.
        """
        if weight is None or self._runs_backward is False:
            loss = self._checked(self._function(output, target, **options))
            if weight is not None:
                self._require_gradient(loss.requires_grad)
                self._pending[microbatch] = _Pending(loss, [], [])
            return loss.detach()
        cuts: list[_Cut] = []
        output = _cut(output, cuts)
        aside = _SetAside(self._modules)
        try:
            loss = self._checked(self._function(output, target, **options))
            gradients = [cut.take() for cut in cuts]
            left = any(gradient is not None for gradient in gradients)
            self._require_gradient(loss.requires_grad or left)
        except BaseException:
            aside.take_back()
            raise
        added = aside.add(weight())
        if self._runs_backward is None:
            self._runs_backward = left or added
            if left and self._weighs and not added:
                _tell_what_is_not_weighted(self._where)
        self._pending[microbatch] = _Pending(loss if loss.requires_grad else None, cuts, gradients)
        return loss.detach()

    def _checked(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise InputError(
                f"{self._where}: loss_fn returned a value of {what}; it must return a tensor with one element "
                "(for example a mean)"
            )
        return loss

    def _require_gradient(self, has_one: bool) -> None:
        if not has_one:
            raise InputError(
                f"{self._where}: the loss depends on nothing that requires a gradient: unfreeze a parameter, look for "
                "a detach() or no_grad() on the way to the loss, leave the gradient on the output if loss_fn runs its "
                "own backward, or call eval()"
            )

    def roots(self, microbatch: int, weight: float) -> Roots:
        """What the microbatch's backward starts from.

        Args:
            weight: the microbatch's weight in the batch's loss.
        """
        pending = self._pending.pop(microbatch)
        if pending.loss is not None:
            first = self._first_gradient(weight, pending.loss)
            if not pending.cuts:
                return [pending.loss], [first]
            run_backward([pending.loss], [first])
        roots: list[Any] = []
        gradients: list[Tensor] = []
        for cut, left in zip(pending.cuts, pending.gradients, strict=True):
            gradient = cut.leaf.grad
            if left is not None:
                own = left if weight == 1.0 else left * weight
                gradient = own if gradient is None else gradient + own
            if gradient is not None:
                roots.append(cut.edge)
                gradients.append(gradient)
        return roots, gradients

    def _first_gradient(self, weight: float, loss: Tensor) -> Tensor:
        key = (weight, loss.dtype, loss.device, loss.shape)
        found = self._weights.get(key)
        if found is None:
            if len(self._weights) >= 64:
                self._weights.clear()
            found = self._weights[key] = torch.full_like(loss, weight, requires_grad=False)
        return found.clone()  # autograd may make it, or a view of it, somebody's `.grad`


def _cut(output: Any, cuts: list[_Cut]) -> Any:
    """The output with a cut in each tensor that requires a gradient; the same tensor twice is one cut."""
    made: dict[int, _Cut] = {}

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = _Cut(tensor)
            cuts.append(made[id(tensor)])
        return made[id(tensor)].inside

    return map_tensors(output, cut)


def _tell_what_is_not_weighted(where: str) -> None:
    warnings.warn(
        f"{where}: loss_fn runs its own backward. The gradient that it leaves on the output, and what it adds to "
        "parameters of the last stage, is weighted by the microbatch's share of the batch (scale_grads=True). What it "
        "adds to other parameters is not: move them into the last stage, weight that in loss_fn, or pass "
        "scale_grads=False",
        stacklevel=3,
    )
