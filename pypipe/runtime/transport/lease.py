"""Leases: what a channel hands out is a message, and the memory in which it lies until it is given back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pypipe.runtime.tensor_memory import memory_parts
from pypipe.runtime.transport.kept_tensors import is_kept

__all__ = ["CopiesLease", "Lease", "SlotLease", "SlotOwner"]


class Lease(ABC):
    """One message, whose memory is the stage's until it gives it back.

    Attributes:
        tree: what the sender sent.
        leaves: in training, the tensors that gradients are wanted for, in the sender's order; backward fills their
            `.grad`.
        rows, batch_rows: this microbatch's and the whole batch's share of the data, in rows; 0: unknown.
    """

    __slots__ = ("_shared", "batch_rows", "leaves", "rows", "tree")

    def __init__(self, tree: Any, leaves: list[Tensor], rows: int = 0, batch_rows: int = 0) -> None:
        self.tree = tree
        self.leaves = leaves
        self.rows = rows
        self.batch_rows = batch_rows
        self._shared: list[tuple[int, Tensor, int]] = []

    def note_shared(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        """Notes which of the message's tensors shared memory at the sender, and do not here."""
        self._shared = [(n, tensors[n], tensors[n]._version) for n in numbers if not tensors[n].is_inference()]

    def forget_shared(self) -> None:
        """Forgets what note_shared() has noted."""
        self._shared = []

    def changed_shared(self) -> int | None:
        """After the stage's forward: the number of a tensor that shared memory and was changed in place; else None."""
        if not self._shared:
            return None
        shared, self._shared = self._shared, []
        return next((number for number, tensor, version in shared if tensor._version != version), None)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's values lie in this memory."""
        for part in memory_parts(tensor):  # noqa: SIM110  no generator: this runs for every microbatch
            if self._holds_part(part):
                return True
        return False

    @abstractmethod
    def _holds_part(self, part: Tensor) -> bool:
        """`holds` of a plain, strided tensor."""

    @abstractmethod
    def is_kept(self) -> bool:
        """Tells whether anything else holds a tensor on this memory: a hook has kept it, or it is a `.grad`.

        The stage lets go of `tree` and `leaves` first.
        """

    def after_forward(self) -> None:
        """Called after the stage's forward, which may have changed its input in place."""

    @abstractmethod
    def give_back(self) -> None:
        """Ends the lease. A backward that has saved one of the tensors and runs later gets autograd's version error."""

    @abstractmethod
    def give_back_unread(self) -> None:
        """Ends the lease, where no backward can have saved one of the tensors."""


class SlotOwner(Protocol):
    """What a message's slot belongs to: a link's receiving end."""

    def lies_in(self, message: Any, tensor: Tensor) -> bool:
        """Whether the tensor's memory lies in the message's slot."""

    def is_ahead(self, message: Any) -> bool:
        """Whether the tensors of the next message in this slot have been made already."""

    def release(self, message: Any) -> None:
        """Gives the slot back to the sender."""


class SlotLease(Lease):
    """A message from another rank; its tensors are views of a slot, which the next message will overwrite.

    Args:
        owner: whose slot it is.
        message: the owner's word for what lies in the slot.
        tensors: the message's tensors.
        leaves: see Lease.
        entered: which of the tensors begin a graph, at whose end a leaf has the same storage; None: none of them.
        beside: keeps one more tensor on each storage; None: nothing does.
    """

    __slots__ = ("_beside", "_entered", "_message", "_owner", "_tensors")

    def __init__(
        self,
        owner: SlotOwner,
        message: Any,
        tree: Any,
        tensors: list[Tensor],
        leaves: list[Tensor],
        entered: Sequence[bool] | None = None,
        beside: object | None = None,
    ) -> None:
        super().__init__(tree, leaves, message.rows, message.batch_rows)
        self._entered = entered
        self._owner = owner
        self._message: Any = message
        self._tensors = tensors
        self._beside = beside

    def _holds_part(self, part: Tensor) -> bool:
        return self._message is not None and self._owner.lies_in(self._message, part)

    def is_kept(self) -> bool:
        owner = self._owner
        return is_kept(
            self._tensors,
            entered=self._entered,
            beside=self._beside is not None,
            ahead=owner.is_ahead(self._message),
        )

    def give_back(self) -> None:
        for tensor in self._tensors:
            if not tensor.is_inference():  # under inference_mode there are no versions
                torch.autograd.graph.increment_version(tensor)
        self.give_back_unread()

    def give_back_unread(self) -> None:
        message, self._message = self._message, None
        if message is None:
            return
        self._tensors = []
        self.tree = self._beside = None
        self._owner.release(message)


class CopiesLease(Lease):
    """Copies of a message's tensors: memory of the stage's own, for as long as its backward reads it."""

    __slots__ = ("_copies", "_entered")

    def __init__(
        self,
        tree: Any,
        copies: list[Tensor],
        leaves: list[Tensor],
        entered: Sequence[bool] | None = None,
        rows: int = 0,
        batch_rows: int = 0,
    ) -> None:
        super().__init__(tree, leaves, rows, batch_rows)
        self._copies = copies
        self._entered = entered

    def _holds_part(self, part: Tensor) -> bool:
        pointer = part.untyped_storage().data_ptr()
        return any(copy.untyped_storage().data_ptr() == pointer for copy in self._copies)

    def is_kept(self) -> bool:
        return is_kept(self._copies, entered=self._entered)

    def give_back(self) -> None:
        self._copies = []
        self.tree = None

    def give_back_unread(self) -> None:
        self.give_back()
