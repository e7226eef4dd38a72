"""Lends the memory of received gradients to a stage's backward, and to the hooks that it runs.

A hook may keep a gradient, and autograd may make it some tensor's `.grad`. Then the slot's memory is theirs for good:
the channel has one slot to spare for that. From then on they get copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch import Tensor

from pypipe.errors import PipelineError
from pypipe.runtime.transport.lease import CopiesLease, Lease

__all__ = ["CopiedGradients", "Gradients", "LentGradients"]


class Source(Protocol):
    """A channel's receiving end."""

    def receive(self, microbatch: int, *, training: bool) -> Lease:
        """Waits for this microbatch's message."""


class Gradients(ABC):
    """Takes the gradients of a stage's outputs and gives their memory back.

    Args:
        source: the channel that they come through.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    @abstractmethod
    def take(self, microbatch: int) -> Lease:
        """Waits for this microbatch's gradients.

        Returns:
            A lease whose `tree` is a list: a gradient for each output that required one; None where nothing depends on
            that output.
        """

    @abstractmethod
    def give_back(self, lease: Lease) -> None:
        """Called after the last half of the backward, when the stage has let go of what `tree` held."""

    def end_step(self) -> None:
        """Called after a step without an error."""

    def _take(self, microbatch: int) -> Lease:
        lease = self._source.receive(microbatch, training=False)
        lease.forget_shared()  # gradients are not changed in place
        if not isinstance(lease.tree, list):
            lease.tree = [lease.tree]
        return lease

    def _take_copies(self, microbatch: int) -> Lease:
        lease = self._take(microbatch)
        copies = [_copy(gradient) for gradient in lease.tree]
        lease.give_back_unread()
        return CopiesLease(copies, [copy for copy in copies if copy is not None], [])


class CopiedGradients(Gradients):
    """Copies every gradient: for links that cannot tell whether a tensor has been kept."""

    def take(self, microbatch: int) -> Lease:
        return self._take_copies(microbatch)

    def give_back(self, lease: Lease) -> None:
        lease.give_back()


class LentGradients(Gradients):
    """The memory in which gradients came, until one is kept; copies from then on.

    Args:
        tries: whether the first step is a trial with copies. Where backwards are split, several leases are out at once,
            and that one is kept shows late, when there is no slot to spare for the others.
    """

    def __init__(self, source: Source, *, tries: bool) -> None:
        super().__init__(source)
        self._tries = tries
        self._copies = False
        self._kept: Lease | None = None

    def take(self, microbatch: int) -> Lease:
        return self._take_copies(microbatch) if self._copies or self._tries else self._take(microbatch)

    def give_back(self, lease: Lease) -> None:
        lease.tree = None
        if not lease.is_kept():
            lease.give_back_unread()
            return
        self._copies = True
        if isinstance(lease, CopiesLease):
            return
        if self._kept is not None:
            raise PipelineError(
                "hooks of this stage have begun to keep the gradients of its output, more of them at once than there "
                "are slots to spare: keep gradient.clone() instead"
            )
        self._kept = lease

    def end_step(self) -> None:
        self._tries = False


def _copy(gradient: Any) -> Tensor | None:
    return None if gradient is None else gradient.clone()
