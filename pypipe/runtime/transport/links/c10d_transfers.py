"""Waits for transfers of the c10d link's backend, and decides whose error is raised where one fails.

A Work of c10d can be waited for but not interrupted, so another thread waits for it, while the waiting rank watches
the control socket, its deadline and Ctrl-C. When the pipeline fails, that thread is left behind: it ends with its Work,
or with the script (works.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pypipe import _core
from pypipe.errors import PipelineError, PipelineTimeout

__all__ = ["Completion", "Route", "as_pipeline_error"]

_SLICE_SECONDS = 0.05
_HUB_SECONDS = 0.5  # for the hub to learn of what the backend has run into


@dataclass(frozen=True)
class Route:
    """Where one channel's messages go.

    Attributes:
        hub: the control sockets.
        group: the process group.
        peer: the other rank, in the group.
        channel: the channel's number, the same at both ends.
        tag: distinguishes this channel's messages from all others between the two ranks.
        slots: messages that may be under way or in use at once.
        device: where tensors live.
        buffers: where messages lie as the backend sends and receives them; the same kind of device at both ends, since
            it decides which of the group's backends carries them.
        wait_policy: how long to wait.
    """

    hub: _core.Hub
    group: Any
    peer: int
    channel: int
    tag: int
    slots: int
    device: torch.device
    buffers: torch.device
    wait_policy: _core.WaitPolicy

    @property
    def global_peer(self) -> int:
        """The other rank, in the world."""
        return dist.get_global_rank(self.group, self.peer)


class Completion:
    """A transfer that is under way.

    Args:
        route: of a transfer that no rank may be waiting for: its failure fails the pipeline.
    """

    def __init__(self, route: Route | None = None) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self.route = route

    def end(self) -> None:
        """Lets those that wait go on."""
        self.done.set()

    def fail(self, error: Exception) -> None:
        """Notes the error."""
        self.error = error
        route = self.route
        if route is not None:
            hub = route.hub
            with contextlib.suppress(_core.CoreError):
                let_hub_speak(route)
                text = f"sending to rank {route.peer} through torch.distributed failed: {error}"
                hub.abort(_core.Cause(_core.CauseKind.LINK, hub.rank, message=text))

    def wait(self, route: Route, what: str) -> None:
        """Waits; where both the hub and the backend report an error, raises the hub's, which says more."""
        deadline = time.monotonic() + route.wait_policy.timeout
        while not self.done.wait(_SLICE_SECONDS):
            try:
                route.hub.check(route.peer)
            except _core.CoreError as error:
                if error.fault != "peer_gone":
                    raise
                # It said goodbye, so its bytes are under way.
            if time.monotonic() >= deadline:
                if route.wait_policy.prolong():
                    deadline = time.monotonic() + route.wait_policy.timeout
                    continue
                raise PipelineTimeout(f"{what} rank {route.peer} did not end in {route.wait_policy.timeout:g} s")
        if self.error is not None:
            let_hub_speak(route)
            raise PipelineError(
                f"{what} rank {route.peer} through torch.distributed failed: {self.error}"
            ) from self.error


def let_hub_speak(route: Route) -> None:
    """After an error of the backend: raises what the hub knows, or comes to know in a moment.

    A peer's death closes the backend's sockets and the hub's in any order, and "connection reset" says less.
    """
    deadline = time.monotonic() + _HUB_SECONDS
    while True:
        route.hub.check(route.peer)
        if time.monotonic() >= deadline:
            return
        time.sleep(0.005)


@contextlib.contextmanager
def as_pipeline_error(what: str, route: Route) -> Iterator[None]:
    """Turns what the backend raises into the hub's error, or a PipelineError."""
    try:
        yield
    except RuntimeError as error:
        let_hub_speak(route)
        raise PipelineError(f"{what} rank {route.peer} through torch.distributed failed: {error}") from error
