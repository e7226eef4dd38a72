"""Handing over between two stages of one rank: in memory, without a transfer, and detached all the same.

Each stage's backward is its own, so what one stage returns enters the next as leaves. The memory is shared, not
copied: as in a model without a pipeline, a stage that changes its input in place changes what the stage before may have
saved for its backward, which then is autograd's version error and never a wrong gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from pypipe.runtime.autograd.engine import enter
from pypipe.runtime.tensor_memory import memory_parts
from pypipe.runtime.transport import trees
from pypipe.runtime.transport.channels import Received
from pypipe.runtime.transport.distributed_tensors import Meshes

__all__ = ["Handed", "LocalChannel"]


class _Parcel:
    """What was handed over and not yet taken."""

    __slots__ = ("batch_rows", "description", "rows", "tensors")

    def __init__(self, description: trees.Description, tensors: list[Tensor], rows: int, batch_rows: int) -> None:
        self.description = description
        self.tensors = tensors
        self.rows = rows
        self.batch_rows = batch_rows


class Handed:
    """What a stage got from another one of its rank; to the stage's execution, the like of `Received`."""

    __slots__ = ("_entered", "_pointers", "batch_rows", "leaves", "rows", "tree")

    def __init__(self, parcel: _Parcel, meshes: Meshes | None, *, training: bool) -> None:
        tensors = parcel.tensors
        self._pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._entered: list[Tensor] = []
        self.leaves: list[Tensor] = []
        entered = [self._enter(tensor) if training and tensor.requires_grad else tensor.detach() for tensor in tensors]
        alone = parcel.description[0] == "T"
        self.tree = entered[0] if alone else trees.rebuild(parcel.description, entered, meshes)
        self.rows = parcel.rows
        self.batch_rows = parcel.batch_rows

    def _enter(self, tensor: Tensor) -> Tensor:
        leaf = tensor.detach().requires_grad_()  # has the tensor's version counter
        inside = enter(leaf)
        if leaf.is_contiguous():
            # The leaf is there for its gradient. The memory stays for as long as somebody has saved it for backward.
            leaf.data = _nothing(type(leaf), leaf.dtype, leaf.device, leaf.shape)
        self.leaves.append(leaf)
        self._entered.append(inside)
        return inside

    def settle(self) -> None:
        """After the forward: in-place changes count as changes of what the stage before returned."""
        for inside, leaf in zip(self._entered, self.leaves, strict=True):
            if inside._version:
                torch.autograd.graph.increment_version(leaf)
        self._entered = []

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is the one that was handed over."""
        for part in memory_parts(tensor):  # noqa: SIM110  no generator: this runs for every microbatch
            if part.untyped_storage().data_ptr() in self._pointers:
                return True
        return False

    def is_shared(self) -> bool:
        """False: this memory is nobody's slot, so whoever keeps it may."""
        return False

    def release(self, *, unseen: bool = False) -> None:
        """Forgets it."""
        self.tree, self.leaves, self._entered = None, [], []


class LocalChannel:
    """Both ends of one stage boundary in one direction, within a rank."""

    posts = False
    storages_apart = True

    def __init__(self) -> None:
        self._parcels: dict[int, _Parcel] = {}
        self.meshes: Meshes | None = None
        """The receiving stage's."""

    def reset(self) -> None:
        """Forgets what a step that failed left behind."""
        self._parcels = {}

    def send(
        self, tree: Any, microbatch: int, rows: int, batch_rows: int, lender: Received | Handed | None = None
    ) -> list[Tensor]:
        """Hands a tree over and returns its tensors in the order in which the other stage counts them.

        Args:
            tree: as for a SendChannel.
            microbatch, rows, batch_rows: as for a SendChannel.
            lender: whose memory may be overwritten before the other stage is done with it: what lies there is copied.

        Raises:
            LayoutError: the tree holds something that could not be sent to another rank either.
        """
        tensors: list[Tensor] = []
        description = trees.describe(tree, tensors)
        handed = [tensor if lender is None or not lender.holds(tensor) else _copy(tensor) for tensor in tensors]
        if len(handed) > 1:
            handed = _apart(handed)
        self._parcels[microbatch] = _Parcel(description, handed, rows, batch_rows)
        return tensors

    def has_room(self) -> bool:
        """True: nothing waits here, and nobody asks."""
        return True

    def receive(self, microbatch: int, *, training: bool) -> Handed:
        """Takes what was handed over for this microbatch."""
        return Handed(self._parcels.pop(microbatch), self.meshes, training=training)


@functools.lru_cache(maxsize=256)
def _nothing(_kind: type[Tensor], dtype: torch.dtype, device: torch.device, shape: torch.Size) -> Tensor:
    """A tensor of this shape on the memory of one element, which nobody reads or writes; for each kind (a fake one)."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


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
