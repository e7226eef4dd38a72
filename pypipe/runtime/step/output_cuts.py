"""Cuts a stage's output off from the stage while the loss function runs: gradients gather at the cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pypipe.runtime.autograd.engine import enter, gradient_edge
from pypipe.runtime.batch.structure import map_tensors

__all__ = ["Cut", "cut_output"]


class Cut:
    """One output tensor, cut off from its stage.

    Attributes:
        edge: where the tensor's gradient goes.
        inside: what the loss function gets, which it may change in place; None once it has run.
        own: the gradient that a backward() of the function's has brought here.
        assigned: the one that the function has left as `.grad`. It counts where no other has come.
    """

    __slots__ = ("assigned", "edge", "inside", "leaf", "own")

    def __init__(self, tensor: Tensor) -> None:
        self.edge = gradient_edge(tensor)
        self.leaf = tensor.detach().requires_grad_()
        self.inside: Tensor | None = enter(self.leaf)
        self.own: Tensor | None = None
        self.assigned: Tensor | None = None

    def take(self, *, has_graph: bool) -> bool:
        """Takes the gradients that the loss function has left; returns whether there are any.

        Args:
            has_graph: whether the returned loss has a graph.
        """
        inside, self.inside = self.inside, None
        assert inside is not None
        if inside._version:  # else autograd would not notice that a tensor which the stage has saved has changed
            torch.autograd.graph.increment_version(self.leaf)
        self.own, self.leaf.grad = self.leaf.grad, None
        if self.own is None:
            retains = inside.retains_grad  # then autograd.grad() fills `.grad` too, and that is not to go on
            if not (inside.is_leaf or retains):
                inside.retain_grad()  # else reading `.grad` warns
            if not (retains and has_graph):
                self.assigned = inside.grad
        return self.own is not None or self.assigned is not None

    def gradient(self, weight: float) -> Tensor | None:
        """The gradient that goes on into the stage, after the backward of the returned loss.

        Args:
            weight: of what the loss function has left; the loss's own backward is weighted already.
        """
        left = self.own
        if left is None and self.leaf.grad is None:
            left = self.assigned
        if left is None:
            return self.leaf.grad
        left = left if weight == 1.0 else left * weight
        return left if self.leaf.grad is None else self.leaf.grad + left


def cut_output(output: Any, cuts: list[Cut]) -> Any:
    """The output with a cut in each tensor that requires a gradient; the same tensor twice is one cut."""
    made: dict[int, Cut] = {}

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = Cut(tensor)
            cuts.append(made[id(tensor)])
        return made[id(tensor)].inside  # type: ignore[return-value]

    return map_tensors(output, cut)
