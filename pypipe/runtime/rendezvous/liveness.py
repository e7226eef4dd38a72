"""Publishes each rank's process in the store, so that its end is noticed before there are control sockets."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from pypipe.runtime.rendezvous.world import World, host_identity

__all__ = ["declare", "ended_process"]


def declare(world: World) -> None:
    """Shows the other ranks which process this rank is."""
    if world.store is not None:
        pid = os.getpid()
        process = {"host": _host(), "pid": pid, "started": _state(pid)[1]}
        with contextlib.suppress(Exception):  # without a store, the rendezvous says so
            world.store.set(world.key("process", world.rank), json.dumps(process))


def ended_process(world: World, rank: int) -> int | None:
    """The number of the process that a rank was, where that ran on this host and has ended; None: as far as is known.

    A rank on another host is not known to be gone.
    """
    key = world.key("process", rank)
    if not world.store.check([key]):
        return None
    process = json.loads(world.store.get(key))
    if process["host"] != _host():
        return None
    state, started = _state(process["pid"])
    return process["pid"] if state in "XZ" or started != process["started"] else None


def _host() -> str:
    """What two processes share where the one's number means the other to both."""
    try:
        return f"{host_identity()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{host_identity()}/{os.getpid()}"


def _state(pid: int) -> tuple[str, str]:
    """A process's state (X: it has ended) and when it started, since numbers of processes are used again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]
