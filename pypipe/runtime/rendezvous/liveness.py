"""Publishes each rank's process in the store, so that its end is noticed before there are control sockets."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from pathlib import Path

from pypipe.runtime.rendezvous.world import World, host_identity

__all__ = ["declare", "ended_process", "has_started"]


_declared: set[tuple[int, str]] = set()


def declare(world: World) -> None:
    """Shows the other ranks which process this rank is, and at its exit that it has ended, if they never met."""
    pid = os.getpid()
    if world.store is None or (pid, world.name) in _declared:
        return
    _declared.add((pid, world.name))
    _show(world, {"host": _host(), "pid": pid, "started": _state(pid)[1]})

    def show_end() -> None:
        if os.getpid() == pid and world.rendezvous() < 0:  # else the control sockets, or the rendezvous, have said it
            _show(world, {"host": "", "pid": pid, "started": ""})

    atexit.register(show_end)


def _show(world: World, process: dict[str, object]) -> None:
    with contextlib.suppress(Exception):  # without a store, the rendezvous says so
        world.store.set(world.key("process", world.rank), json.dumps(process))


def has_started(world: World, rank: int) -> bool:
    """Whether a rank has built its first PipelineStage."""
    return bool(world.store.check([world.key("process", rank)]))


def ended_process(world: World, rank: int) -> int | None:
    """The number of the process that a rank was, where that has ended; None: as far as is known, it has not.

    A process that was killed on another host is not known to be gone.
    """
    if not has_started(world, rank):
        return None
    process = json.loads(world.store.get(world.key("process", rank)))
    if not process["host"]:  # it said so itself
        return int(process["pid"])
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
