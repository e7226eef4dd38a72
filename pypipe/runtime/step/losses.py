"""Calls the loss function, and finds what a backward starts from.

An ordinary loss function returns a loss with a graph, from which a backward goes on into the stage. Others (chunked
cross entropy) run their own backward: such a function detaches the output, walks its own graph piece by piece so that
the whole of it is never alive, leaves the gradient on the output, and returns a number. That gradient is to go on into
the stage, but only in this microbatch's backward, which comes later.

So in the first step losses are computed behind a cut: on leaves with the output's values, at which gradients stop and
gather. If the function has left any there, in whichever microbatch, it gets leaves in all later steps. Else it gets the
output itself from the second step on, which saves an engine run per microbatch. While the function runs, `.grad` of the
stage's parameters is set aside, since its backward may use them too (a head in the last stage): what has been added is
weighted like the rest, or taken back if the loss is refused. A function that begins to run its own backward in a later
step has added gradients before they could be weighted: that is an error.

The gradients that go on into the stage are those that would without a pipeline: what a backward() in the function has
brought to the output, and what the returned loss brings there. Only if neither has brought any does a `.grad` count
that the function has assigned to the output. What torch.autograd.grad() returns is up to the function.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pypipe.errors import InputError
from pypipe.runtime.autograd.engine import run_backward
from pypipe.runtime.step.gradient_watch import GradientsSetAside, GradientWatch, trained_parameters
from pypipe.runtime.step.output_cuts import Cut, cut_output

__all__ = ["Losses"]

Roots = tuple[list[Any], list[Tensor]]
"""What a backward starts from: tensors or gradient edges, and a gradient for each."""


class _Pending:
    """A microbatch between its forward and its backward."""

    __slots__ = ("cuts", "loss")

    def __init__(self, loss: Tensor | None, cuts: list[Cut]) -> None:
        self.loss = loss
        self.cuts = cuts


class Losses:
    """The losses of the last stage.

    Args:
        function: the loss function.
        module: the stage's module.
        where: how messages call the stage.
        weighs: whether microbatches are weighted by their share of the batch.
        two_copies: whether another copy of the stage has a part of the microbatches, so that only what both know may
            get gradients.
    """

    def __init__(
        self, function: Callable[..., Any], module: nn.Module, where: str, *, weighs: bool, two_copies: bool = False
    ) -> None:
        self._two_copies = two_copies
        self._function = function
        self._modules = [module, function] if isinstance(function, nn.Module) else [module]
        self._where = where
        self._weighs = weighs
        self._runs_backward: bool | None = None  # by itself; None: not known yet
        self._watch = GradientWatch([])
        self._of_losses: dict[int, Tensor] = {}  # parameters that the first step's losses depend on by themselves
        self._has_leaves = False
        self._pending: dict[int, _Pending] = {}
        self._weights: dict[tuple[Any, ...], Tensor] = {}

    def reset(self) -> None:
        """Forgets the microbatches of a step."""
        self._pending = {}

    def end_step(self) -> None:
        """After a step without an error, of which compute() has seen each microbatch."""
        if self._runs_backward is not None:
            return
        self._runs_backward = False
        # A backward through the output also reaches the input's leaves, or, without any, a parameter that leads to the
        # output. One that does not go through it adds to what the loss itself depends on, or to what is unused so far.
        watched = self._of_losses
        parameters = trained_parameters(self._modules)
        used = [parameter for parameter in parameters if parameter.grad is not None]
        watched |= {id(parameter): parameter for parameter in parameters if parameter.grad is None}
        if not self._has_leaves:
            watched |= {id(parameter): parameter for parameter in (*used[:1], *used[-1:])}
        self._watch = GradientWatch(watched.values())
        self._of_losses = {}

    def compute(
        self,
        microbatch: int,
        output: Any,
        target: Any,
        options: dict[str, Any],
        weight: Callable[[], float] | None,
        leaves: Sequence[Tensor] = (),
    ) -> Tensor:
        """Calls the loss function.

        Args:
            microbatch: whose output it is.
            output, target: what the function is called with.
            options: its keyword arguments.
            weight: tells the microbatch's weight in the batch's loss; None: no backward will follow.
            leaves: of the stage's input.

        Returns:
            The loss, detached; one element.

        Raises:
            InputError: the loss is not a tensor of one element, or no gradient can be had of it; or the function has
                begun to run its own backward after the first step.
        """
        if weight is None:
            return self._checked(self._function(output, target, **options), trains=False).detach()
        if self._runs_backward is False:
            before = self._watch.state(leaves)
            loss = self._checked(self._function(output, target, **options))
            if self._watch.state(leaves) != before:
                raise self._begun(microbatch)
            self._require_gradient(loss.requires_grad)
            self._pending[microbatch] = _Pending(loss, [])
            return loss.detach()
        self._has_leaves = self._has_leaves or bool(leaves)
        cuts: list[Cut] = []
        output = cut_output(output, cuts)
        aside = GradientsSetAside(self._modules)
        try:
            loss = self._checked(self._call_on_cut(output, target, options))
            taken = [cut.take(has_graph=loss.requires_grad) for cut in cuts]
            left = any(taken)
            self._require_gradient(loss.requires_grad or left)
            if self._two_copies:
                self._require_known(loss, cuts)
        except BaseException:
            aside.take_back()
            raise
        added = aside.add(weight())
        if self._runs_backward is None and (left or added):
            self._runs_backward = True
            if left and self._weighs and not added:
                _tell_what_is_not_weighted(self._where)
        self._pending[microbatch] = _Pending(loss if loss.requires_grad else None, cuts)
        return loss.detach()

    def _require_known(self, loss: Tensor, cuts: Sequence[Cut]) -> None:
        """Raises InputError where the loss leads to a leaf of which the other copy's last stage does not know."""
        known = {id(parameter) for parameter in _parameters(self._modules)} | {id(cut.leaf) for cut in cuts}
        for leaf in _leaves_behind(loss):
            if id(leaf) not in known:
                raise InputError(
                    f"{self._where}: the loss depends on a tensor of shape {tuple(leaf.shape)} that requires a "
                    "gradient and is neither in the last stage nor in a loss_fn that is an nn.Module. Both ends of a "
                    "schedule of two model copies would get the gradient of their own microbatches only: make loss_fn "
                    "a module that has it as a parameter, detach() it, or use ScheduleDualPipeV"
                )

    def _call_on_cut(self, output: Any, target: Any, options: dict[str, Any]) -> Any:
        try:
            return self._function(output, target, **options)
        except RuntimeError as error:
            if "not have been used in the graph" in str(error):
                error.add_note(
                    f"pypipe: {self._where}: loss_fn gets the output without the stage's graph: torch.autograd.grad() "
                    "can be asked for gradients of the output there, and not for those of the stage's parameters"
                )
            raise

    def _begun(self, microbatch: int) -> InputError:
        self._runs_backward = None
        return InputError(
            f"{self._where}, microbatch {microbatch}: loss_fn has run a backward of its own, which it had not done in "
            "the first step. What it has added to .grad is not weighted by the microbatch's share of the batch: call "
            "zero_grad(). Let it return a loss with a graph always; or let it run its own backward in the first step "
            "too, if only by output.backward(torch.zeros_like(output))"
        )

    def _checked(self, loss: Any, *, trains: bool = True) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise InputError(
                f"{self._where}: loss_fn returned a value of {what}; it must return a tensor with one element "
                "(for example a mean)"
            )
        if trains and not loss.is_floating_point():
            remedy = "its real part, or abs()" if loss.is_complex() else "one of a floating-point dtype"
            raise InputError(
                f"{self._where}: loss_fn returned a loss of dtype {loss.dtype}; a gradient can be had of a real loss "
                f"only, as in torch: return {remedy}"
            )
        return loss

    def _require_gradient(self, has_one: bool) -> None:
        if has_one:
            return
        if self._runs_backward is False:
            raise InputError(
                f"{self._where}: loss_fn returned a loss without a graph, which in the first step had one: look for a "
                "detach() or no_grad() on the way to the loss. If it runs its own backward now, let it do so in the "
                "first step too, if only by output.backward(torch.zeros_like(output)); and call zero_grad(), since it "
                "may have added to .grad"
            )
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
            self._run_own(pending.loss, first)
        roots: list[Any] = []
        gradients: list[Tensor] = []
        for cut in pending.cuts:
            gradient = cut.gradient(weight)
            if gradient is not None:
                roots.append(cut.edge)
                gradients.append(gradient)
        return roots, gradients

    def _run_own(self, loss: Tensor, first: Tensor) -> None:
        """Backward from a loss to the cuts; in the first step, looks what else it comes to."""
        if self._runs_backward is not None:
            run_backward([loss], [first])
            return
        parameters = trained_parameters(self._modules)
        watch = GradientWatch(parameters)
        before = watch.state()
        run_backward([loss], [first])
        for parameter, was, now in zip(parameters, before, watch.state(), strict=True):
            if was != now:
                self._of_losses[id(parameter)] = parameter

    def _first_gradient(self, weight: float, loss: Tensor) -> Tensor:
        key = (weight, loss.dtype, loss.device, loss.shape)
        found = self._weights.get(key)
        if found is None:
            if len(self._weights) >= 64:
                self._weights.clear()
            found = self._weights[key] = torch.full_like(loss, weight, requires_grad=False)
        return found.clone()  # autograd may make it, or a view of it, the `.grad` of a tensor


def _parameters(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Those that require a gradient, each once."""
    return list({id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values())


def _leaves_behind(tensor: Tensor) -> Iterator[Tensor]:
    """The leaves that a backward of a tensor comes to."""
    if tensor.grad_fn is None:
        return
    nodes: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += (following for following, _ in node.next_functions)


def _tell_what_is_not_weighted(where: str) -> None:
    warnings.warn(
        f"{where}: loss_fn runs its own backward. The gradient that it leaves on the output, and what it adds to "
        "parameters of the last stage, is weighted by the microbatch's share of the batch (scale_grads=True). What it "
        "adds to other parameters is not: move them into the last stage, weight that in loss_fn, or pass "
        "scale_grads=False",
        stacklevel=3,
    )
