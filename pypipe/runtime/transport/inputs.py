"""Lends the memory of received inputs to a stage's forward and backward.

A stage may keep its input, or a view of it, for longer: a module that looks back, a hook that collects activations. The
slot would then be overwritten under it. So the first step and the first eval get copies, which show whether anything is
kept; if so, all later ones get copies too.
"""

from __future__ import annotations

from typing import Protocol

from pypipe.errors import PipelineError
from pypipe.runtime.transport.lease import CopiesLease, Lease

__all__ = ["Inputs", "WatchedInputs"]


class Source(Protocol):
    """A channel's receiving end."""

    def receive(self, microbatch: int, *, training: bool, copies: bool = False) -> Lease:
        """Waits for this microbatch's message."""


class Inputs:
    """Takes a stage's inputs and gives their memory back, which may be kept.

    Args:
        source: the channel that they come through.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def take(self, microbatch: int, *, training: bool) -> Lease:
        """Waits for this microbatch's input."""
        return self._source.receive(microbatch, training=training)

    def give_back(self, lease: Lease) -> None:
        """Called when the stage has no more use for an input, and has let go of it."""
        lease.give_back()

    def end_step(self, *, training: bool) -> None:
        """Called after a step or eval without an error."""


class WatchedInputs(Inputs):
    """Inputs in slots, which the next message overwrites.

    Args:
        source: the channel.
        tells: whether a lease on a slot tells that something is kept, as one on copies does.
    """

    def __init__(self, source: Source, *, tells: bool) -> None:
        super().__init__(source)
        self._tells = tells
        self._tries = {True, False}  # in training, and without
        self._copies = False

    def take(self, microbatch: int, *, training: bool) -> Lease:
        return self._source.receive(microbatch, training=training, copies=self._copies or training in self._tries)

    def give_back(self, lease: Lease) -> None:
        if isinstance(lease, CopiesLease):
            self._copies = self._copies or lease.is_kept()
        elif self._tells and lease.is_kept():
            raise PipelineError(
                "a stage, or a hook in it, has begun to keep its input beyond its backward (a module that stores it, a "
                "list of activations): the memory is about to be used for another microbatch. Keep input.clone(), or "
                "keep it from the first step on"
            )
        lease.give_back()

    def end_step(self, *, training: bool) -> None:
        self._tries.discard(training)
