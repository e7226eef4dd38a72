"""What a stage keeps of a microbatch between its actions, and which of it lies in borrowed memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pypipe.runtime.autograd.split import WeightWork
from pypipe.runtime.batch.batch import Share
from pypipe.runtime.batch.structure import map_tensors
from pypipe.runtime.step.current import Current
from pypipe.runtime.tensor_memory import copy_of
from pypipe.runtime.transport.lease import Lease

__all__ = ["MicrobatchState", "detached", "owned"]


class MicrobatchState:
    """What a stage keeps of a microbatch between its actions.

    Attributes:
        share: its share of the batch.
        current: the same, for what runs inside the stage.
        input: what came from the stage before; None on the first one, and once its lease has ended.
        output: what the forward returned, until it is sent.
        nodes: where the gradients of the outputs go, for those that need any.
        gradients: what came from the stage after, until its lease has ended.
        weight_work: what I has left for W.
        passed_on: the input's gradients, until they are sent.
    """

    __slots__ = ("current", "gradients", "input", "nodes", "output", "passed_on", "share", "weight_work")

    def __init__(self, share: Share, received: Lease | None, current: Current) -> None:
        self.share = share
        self.current = current
        self.input = received
        self.output: Any = None
        self.nodes: list[Any] = []
        self.gradients: Lease | None = None
        self.weight_work: WeightWork | None = None
        self.passed_on: list[Tensor | None] | None = None

    def take_over(self) -> None:
        """Copies those of the input's gradients that lie in memory which is about to be given back."""
        if self.passed_on is not None:
            leases = (self.input, self.gradients)
            self.passed_on = [
                copy_of(each) if each is not None and _lies_in(each, *leases) else each for each in self.passed_on
            ]


def detached(tree: Any) -> Any:
    """`tree`, with its tensors detached."""
    if isinstance(tree, Tensor):
        return tree.detach()
    return map_tensors(tree, Tensor.detach)


def _lies_in(tensor: Tensor, *leases: Lease | None) -> bool:
    for lease in leases:  # noqa: SIM110  no generator: this runs for every microbatch
        if lease is not None and (tensor.is_nested or lease.holds(tensor)):
            return True
    return False


def owned(tree: Any, lease: Lease | None) -> Any:
    """`tree`, with copies of the tensors that lie in a lease's memory, which is about to be given back."""

    def own(tensor: Tensor) -> Tensor:
        return copy_of(tensor) if _lies_in(tensor, lease) else tensor

    if isinstance(tree, Tensor):
        return own(tree)
    return map_tensors(tree, own)
