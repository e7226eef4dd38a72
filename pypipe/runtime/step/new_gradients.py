"""Gradients that a backward made the first `.grad` of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pypipe.runtime.tensor_memory import copy_of
from pypipe.runtime.transport.lease import Lease

__all__ = ["NewGradients"]


class NewGradients:
    """Makes sure that no `.grad` lies in borrowed memory.

    Autograd may make a received gradient, or a view of it, the first `.grad` of some tensor, and a backward may hand
    out a saved activation. Later gradients are added to the first.

    Args:
        module: whose parameters get gradients.
        moves: whether gradients are taken out of `.grad` after a backward, so that each of them is a first one.
    """

    def __init__(self, module: nn.Module, *, moves: bool) -> None:
        self._module = module
        self._moves = moves
        self._others: Sequence[Tensor] = ()
        self._without: list[Tensor] = []
        self._is_known = True

    def begin(self, others: Sequence[Tensor]) -> None:
        """Begins a step.

        Args:
            others: leaves outside the module that get gradients too.
        """
        self._others = others
        self._without = []
        self._is_known = False

    def end(self) -> None:
        """Forgets the step."""
        self._others, self._without, self._is_known = (), [], True

    def look(self) -> None:
        """Looks which leaves have no `.grad`.

        The stage's first action does it before it waits: a walk through a module takes long.
        """
        if self._is_known:
            return
        self._is_known = True
        self._without = [p for p in self._module.parameters() if p.requires_grad and p.grad is None]
        self._without += self._others

    def own(self, *leases: Lease | None) -> None:
        """Makes a `.grad` that lies in a lease's memory a tensor of its own."""
        if not self._without:
            return
        for tensor in self._without:
            if tensor.grad is not None and any(lease is not None and lease.holds(tensor.grad) for lease in leases):
                tensor.grad = copy_of(tensor.grad)
        if not self._moves:
            self._without = [tensor for tensor in self._without if tensor.grad is None]
