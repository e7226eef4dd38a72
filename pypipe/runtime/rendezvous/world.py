"""Which ranks form a pipeline, and the store through which they first meet."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pypipe.errors import ConfigurationError
from pypipe.runtime.torch_private import default_store

__all__ = ["World", "find_world", "host_identity"]

_environment_store: Any = None  # one per process: the rendezvous of torchrun's environment happens once
_rendezvous: dict[str, int] = {}  # how often each set of ranks has met; all ranks of a set count alike
_published: dict[str, list[str]] = {}  # what this process has put into the store, by set of ranks


@dataclass(frozen=True)
class World:
    """The ranks of one pipeline.

    Attributes:
        rank, size: this process's place among them.
        store: a torch.distributed store that all of them reach; None where size is 1.
        group: their process group, where there is one.
        name: the same on all of them, and on no other set of ranks.
    """

    rank: int
    size: int
    store: Any
    group: Any
    name: str

    def others(self) -> frozenset[int]:
        """The global ranks of the other members."""
        if self.group is None:  # of torchrun's environment: a default group that comes later has the same ranks
            return frozenset(range(self.size)) - {self.rank}
        return frozenset(dist.get_process_group_ranks(self.group)) - {dist.get_rank()}

    def rendezvous(self) -> int:
        """How often this set of ranks has met, less one."""
        return _rendezvous.get(self.name, -1)

    def next_rendezvous(self, at_least: int = 0) -> int:
        """The number of this set of ranks' next rendezvous. Every rank calls it in the same order, so they agree."""
        count = _rendezvous[self.name] = max(_rendezvous.get(self.name, -1) + 1, at_least)
        return count

    def key(self, *parts: str | int) -> str:
        """A key in the store that is this set of ranks' own."""
        return "/".join(map(str, ("pypipe", self.name, *parts)))

    def publish(self, key: str, value: str) -> None:
        """Puts something into the store, for as long as the other ranks may want to read it."""
        self.store.set(key, value)
        _published.setdefault(self.name, []).append(key)

    def retract(self, key: str) -> None:
        """Takes back what this process has published, once no rank will read it any more."""
        _published[self.name].remove(key)
        self.store.delete_key(key)

    def withdraw(self, prefix: str) -> None:
        """Removes what this process has published for earlier pipelines than the one of this prefix.

        Only once every rank has come to this one's rendezvous, so that none still reads of an earlier one.
        """
        keys = _published.get(self.name, [])
        _published[self.name] = [key for key in keys if key.startswith(f"{prefix}/")]
        for key in keys:
            if not key.startswith(f"{prefix}/"):
                with contextlib.suppress(Exception):  # a store that cannot forget keeps them
                    self.store.delete_key(key)


def find_world(group: Any = None) -> World:
    """The ranks of `group`; else of the default process group; else of torchrun's environment; else this one.

    Raises:
        ConfigurationError: this process is not a member of `group`, or the environment is incomplete.
    """
    if group is not None or (dist.is_available() and dist.is_initialized()):
        rank = dist.get_rank(group)
        if rank < 0:
            raise ConfigurationError(
                f"this process (global rank {dist.get_rank()}) is not in the group that was given to PipelineStage"
            )
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        text = ",".join(map(str, members))
        name = f"ranks-{text}" if len(text) < 64 else f"ranks-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        store = default_store() if len(members) > 1 else None
        return World(rank, len(members), store, group if group is not None else dist.group.WORLD, name)
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        return World(0, 1, None, None, "alone")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set: start the script with torchrun, or call "
            "torch.distributed.init_process_group() first"
        )
    rank = _number("RANK", 0)
    _number("MASTER_PORT", 0)
    if not 0 <= rank < size:
        raise ConfigurationError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks are 0..{size - 1}")
    global _environment_store
    if _environment_store is None:
        _environment_store = next(dist.rendezvous("env://"))[0]  # type: ignore[attr-defined]
    return World(rank, size, _environment_store, None, "environment")


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(
            f"{name}={text!r} is not a number: start the script with torchrun, or unset it"
        ) from None


def host_identity() -> str:
    """What two processes share exactly when abstract Unix sockets connect them: a kernel and a network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    return f"{boot}/{network}"
