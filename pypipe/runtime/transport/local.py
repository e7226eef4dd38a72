"""Hands trees over between two stages of one rank: in memory, without a transfer, but detached.

Each stage runs its own backward, so what one stage returns enters the next as leaves. The memory is shared, not copied.
So, as in a model without a pipeline, a stage that changes its input in place changes what the stage before may have
saved for its backward; autograd then raises its version error, and no gradient is ever wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pypipe.runtime.autograd.engine import enter
from pypipe.runtime.tensor_memory import placeholder
from pypipe.runtime.transport import trees
from pypipe.runtime.transport.distributed_tensors import Meshes
from pypipe.runtime.transport.gradients import Gradients, LentGradients
from pypipe.runtime.transport.inputs import Inputs
from pypipe.runtime.transport.lease import Lease

__all__ = ["LocalChannel", "LocalLease"]


class _Output(NamedTuple):
    """What was handed over and not yet taken."""

    description: trees.Description
    tensors: list[Tensor]
    rows: int
    batch_rows: int


class LocalLease(Lease):
    """A message from another stage of this rank: its memory is that stage's output, which nothing overwrites."""

    __slots__ = ("_entered", "_pointers")

    def __init__(self, output: _Output, meshes: Meshes | None, *, training: bool) -> None:
        tensors = output.tensors
        super().__init__(None, [], output.rows, output.batch_rows)
        self._pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._entered: list[Tensor] = []
        entered = [self._enter(tensor) if training and tensor.requires_grad else tensor.detach() for tensor in tensors]
        alone = output.description[0] == "T"
        self.tree = entered[0] if alone else trees.rebuild(output.description, entered, meshes)
        if output.description[0] == "shared":
            self.note_shared(entered, trees.shared_tensors(output.description))

    def _enter(self, tensor: Tensor) -> Tensor:
        leaf = tensor.detach().requires_grad_()  # has the tensor's version counter
        inside = enter(leaf)
        if leaf.is_contiguous():
            # The leaf is there for its gradient. The memory stays for as long as a node has saved it for backward.
            leaf.data = placeholder(type(leaf), leaf.dtype, leaf.device, leaf.shape)
        self.leaves.append(leaf)
        self._entered.append(inside)
        return inside

    def after_forward(self) -> None:
        """Counts the stage's in-place changes as changes of what the stage before has returned."""
        for inside, leaf in zip(self._entered, self.leaves, strict=True):
            if inside._version:
                torch.autograd.graph.increment_version(leaf)
        self._entered = []

    def _holds_part(self, part: Tensor) -> bool:
        return part.untyped_storage().data_ptr() in self._pointers

    def is_kept(self) -> bool:
        """False: nothing overwrites this memory, so it may be kept."""
        return False

    def give_back(self) -> None:
        self.tree, self.leaves, self._entered = None, [], []

    def give_back_unread(self) -> None:
        self.give_back()


class LocalChannel:
    """Both ends of one stage boundary in one direction, within a rank."""

    def __init__(self) -> None:
        self._outputs: dict[int, _Output] = {}
        self.meshes: Meshes | None = None
        """The receiving stage's."""

    def reset(self) -> None:
        """Forgets what a step that failed left behind."""
        self._outputs = {}

    def gradients(self, *, splits: bool) -> Gradients:
        """What takes the gradients that come through this channel."""
        return LentGradients(self, tries=False)

    def send(self, tree: Any, microbatch: int, rows: int, batch_rows: int, lease: Lease | None = None) -> list[Tensor]:
        """Hands a tree over and returns its tensors in the order in which the other stage counts them.

        Args:
            tree: as for a SendChannel.
            microbatch, rows, batch_rows: as for a SendChannel.
            lease: whose memory may be overwritten before the other stage is done with it: what lies there is copied.

        Raises:
            LayoutError: the tree holds something that could not be sent to another rank either.
        """
        tensors: list[Tensor] = []
        description = trees.describe(tree, tensors)
        handed = [tensor if lease is None or not lease.holds(tensor) else _copy(tensor) for tensor in tensors]
        if len(handed) > 1:
            handed = _apart(handed)
        self._outputs[microbatch] = _Output(description, handed, rows, batch_rows)
        return tensors

    def has_room(self) -> bool:
        """True: nothing waits here."""
        return True

    def inputs(self) -> Inputs:
        """What takes the inputs that come through this channel."""
        return Inputs(self)

    def receive(self, microbatch: int, *, training: bool, copies: bool = False) -> LocalLease:
        """Takes what was handed over for this microbatch."""
        return LocalLease(self._outputs.pop(microbatch), self.meshes, training=training)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, no two of which share memory: autograd could not follow a change of the one to the other."""
    seen: set[int] = set()
    apart = []
    for tensor in tensors:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in seen and tensor.numel():
            tensor = _copy(tensor)
        seen.add(pointer)
        apart.append(tensor)
    return apart
