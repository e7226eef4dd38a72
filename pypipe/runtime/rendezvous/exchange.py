"""How the ranks of a pipeline find each other: they compare what each of them was built with, then connect.

Every rank writes its config into the store and reads all the others. What must be equal is compared on every rank, so
that every rank raises the same error, and none is left waiting.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import itertools
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from pypipe import _core
from pypipe.errors import ConfigurationError, PeerLost, PipelineTimeout
from pypipe.runtime import environment
from pypipe.runtime.rendezvous.config import Config
from pypipe.runtime.rendezvous.handshake import Address, Listener, connect
from pypipe.runtime.rendezvous.liveness import ended_process, has_started
from pypipe.runtime.rendezvous.world import World, host_identity

__all__ = ["Rendezvous", "meet", "public_store_errors", "read_all", "refuse"]

_SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's IPv4 address
_FIRST_POLL_SECONDS = 0.001
_LONGEST_POLL_SECONDS = 0.05
_NOTICE_SECONDS = 15.0  # after which a rank says whom it waits for
_STORE_ERRORS: tuple[type[Exception], ...] = (dist.DistError,) if dist.is_available() else ()


@dataclass
class Rendezvous:
    """The outcome of a rendezvous.

    Attributes:
        configs: every rank's.
        hub: this rank's control sockets, to be started.
        prefix: of this pipeline's keys in the store.
        peers: the ranks that the hub is connected to.
        identity: a word for this pipeline, the same on all its ranks and for no other pipeline anywhere.
    """

    configs: Sequence[Config]
    hub: _core.Hub
    prefix: str
    peers: Sequence[int]
    identity: str


def refuse(world: World, reason: str) -> None:
    """Tells the other ranks, which may wait for this one at the next rendezvous, that its schedule cannot be built."""
    if world.store is not None:
        _write_refusal(world, world.key(world.next_rendezvous()), reason)


def _write_refusal(world: World, prefix: str, reason: str, lost: bool = False) -> None:
    world.publish(f"{prefix}/begun", "1")
    world.publish(f"{prefix}/refused", json.dumps({"rank": world.rank, "reason": reason, "lost": lost}))


def _check_refused(world: World, prefix: str) -> None:
    key = f"{prefix}/refused"
    if world.store.check([key]):
        refusal = json.loads(world.store.get(key))
        if refusal["lost"]:
            raise PeerLost(f"rank {world.rank} heard from rank {refusal['rank']}: {refusal['reason']}")
        raise ConfigurationError(
            f"rank {refusal['rank']} could not build its part of the pipeline: {refusal['reason']}"
        )


@contextlib.contextmanager
def public_store_errors() -> Iterator[None]:
    """Turns what torch raises where the store is gone into PeerLost."""
    try:
        yield
    except _STORE_ERRORS as error:
        raise PeerLost(
            "the store through which the ranks meet does not answer: the process that holds it (as a rule rank 0's) "
            f"has ended ({str(error).splitlines()[0]})"
        ) from None


class _GivenUp(Exception):
    """Some rank waits at a later rendezvous: it has given this one up."""


@public_store_errors()
def read_all(
    world: World, prefix: str, keys: Mapping[int, str], deadline: float, given_up: str | None = None
) -> dict[int, str]:
    """The values of these keys (by rank), as soon as each is there; an empty value counts as none.

    Args:
        given_up: a key that says, once it is there, that what is missing then will not come.
    """
    pause = _FIRST_POLL_SECONDS
    begun = time.monotonic()
    is_noticed = False
    turns = itertools.cycle(rank for rank in keys if rank != world.rank)
    while True:
        # Looked at first, so that a rank which gave up only after it had seen all values is not taken for missing.
        is_given_up = given_up is not None and world.store.check([given_up])
        values: dict[int, str] = {}
        if world.store.check(list(keys.values())):
            values = {rank: world.store.get(key).decode() for rank, key in keys.items()}
            if all(values.values()):
                return values
        _check_refused(world, prefix)
        if is_given_up:
            raise _GivenUp
        # One rank a turn: with many, looking at all would keep the store busy.
        rank = next(turns, world.rank)
        if not values.get(rank) and (pid := ended_process(world, rank)) and not world.store.check([keys[rank]]):
            raise PeerLost(
                f"rank {world.rank} waited for rank {rank} to start the same pipeline, but that rank's process {pid} "
                "has ended before it called step() or eval()"
            )
        now = time.monotonic()
        if not is_noticed and now - begun > _NOTICE_SECONDS:
            is_noticed = True
            _notice(world, keys, values, now - begun, deadline - begun)
        if now >= deadline:
            absent = [rank for rank, key in keys.items() if not world.store.check([key])]
            # Else all came, but one has given up already.
            absent = absent or [rank for rank, value in values.items() if not value]
            raise PipelineTimeout(
                f"rank {world.rank} waited for rank {', '.join(map(str, absent))} to start the same pipeline: every "
                "rank of the group must build its schedule and call step() or eval()"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)


def _notice(world: World, keys: Mapping[int, str], values: Mapping[int, str], seconds: float, timeout: float) -> None:
    """Says on stderr whom this rank waits for: until now nothing is wrong, but the user would see nothing."""
    absent = [rank for rank, key in keys.items() if not values.get(rank) and not world.store.check([key])]
    doing = ", ".join(
        f"rank {rank} ({'has not called step() or eval()' if has_started(world, rank) else 'has no PipelineStage yet'})"
        for rank in absent[:8]
    )
    more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
    print(
        f"pypipe: rank {world.rank} has waited {seconds:.0f} s for {doing}{more} to start the same pipeline; it waits "
        f"for up to {timeout:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _read_configs(world: World, config: Config, deadline: float) -> tuple[str, list[Config]]:
    """Shows this rank's config; returns the prefix of the rendezvous that all ranks have come to, and their configs.

    Ranks count them. One rank may have given up a rendezvous that another comes to late, if at all: its deadline has
    passed, and the next schedule is built. So a rank marks each rendezvous that it begins, takes its config back from
    one that it gives up, and follows a rank that has begun a later one.
    """
    while True:
        number = world.next_rendezvous()
        prefix = world.key(number)
        mine = f"{prefix}/config/{world.rank}"
        if world.rank == 0:
            world.publish(f"{prefix}/secret", secrets.token_hex(32))
        world.publish(f"{prefix}/begun", "1")
        world.publish(mine, config.encode())
        keys = {rank: f"{prefix}/config/{rank}" for rank in range(world.size)}
        try:
            texts = read_all(world, prefix, keys, deadline, given_up=world.key(number + 1, "begun"))
            world.withdraw(prefix)
            return prefix, [Config.decode(texts[rank]) for rank in range(world.size)]
        except BaseException as error:
            with contextlib.suppress(Exception):
                world.store.set(mine, "")
                if isinstance(error, PeerLost):  # ranks on other hosts may not see it themselves
                    _write_refusal(world, prefix, str(error), lost=True)
            if not isinstance(error, _GivenUp):
                raise


def _listening_address() -> str:
    """The address by which ranks on other hosts reach this one; never a wildcard."""
    chosen = environment.read("PYPIPE_ADDRESS")
    if chosen:
        return chosen
    master = os.environ.get("MASTER_ADDR", "")
    if master:
        # Connecting a datagram socket sends nothing: it only asks the routing table.
        for family, kind, protocol, _, where in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                address = str(probe.getsockname()[0])
                if address == master or not ipaddress.ip_address(address).is_loopback:
                    return address
    # The master's own name may mean a loopback address to itself, which is of no use to others. Then the way that a
    # default route would take (the address is of no host: RFC 5737), or else the first interface that has an address.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode())
                address = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
                if not ipaddress.ip_address(address).is_loopback:
                    return address
    return "127.0.0.1"


@public_store_errors()
def meet(
    world: World,
    config: Config,
    compare: Callable[[Sequence[Config]], None],
    neighbours: Callable[[], Iterable[int]],
    timeout: float,
) -> Rendezvous:
    """Meets the other ranks of the pipeline.

    Args:
        world: the ranks.
        config: what this rank was built with (JSON values).
        compare: looks at all configs and raises ConfigurationError where they do not fit together; it must come to
            the same result on every rank.
        neighbours: returns the ranks that this one exchanges messages with; called after `compare`.
        timeout: seconds.

    Raises:
        ConfigurationError: a rank refused, or the configs do not fit together.
        PeerLost: a rank's process has ended, or the store is gone.
        PipelineTimeout: a rank did not come, or could not be connected to.
    """
    deadline = time.monotonic() + timeout
    config = replace(config, host=host_identity())
    secret = b""
    if world.size > 1:
        prefix, configs = _read_configs(world, config, deadline)
    else:
        prefix, configs = world.key(world.next_rendezvous()), [config]
    compare(configs)
    hub = _core.Hub(world.rank)
    try:
        peers = sorted(set(neighbours()))
        if peers:
            secret = bytes.fromhex(read_all(world, prefix, {0: f"{prefix}/secret"}, deadline)[0])
            _connect(world, prefix, configs, peers, secret, hub, deadline)
        identity = hashlib.sha256(b"identity" + (secret or secrets.token_bytes(32))).hexdigest()[:12]
        return Rendezvous(configs, hub, prefix, peers, identity)
    except BaseException as error:
        hub.close()
        if world.store is not None and not isinstance(error, PipelineTimeout):
            with contextlib.suppress(Exception):
                _write_refusal(world, prefix, str(error), lost=isinstance(error, PeerLost))
        raise


def _listen(rank: int, kind: str) -> Listener:
    try:
        return Listener(rank, "unix" if kind == "unix" else _listening_address())
    except OSError as error:
        raise ConfigurationError(
            f"rank {rank} cannot listen for ranks on other hosts ({error}): give PYPIPE_ADDRESS an address of this "
            "host that they reach"
        ) from error


def _connect(
    world: World,
    prefix: str,
    configs: Sequence[Config],
    peers: Sequence[int],
    secret: bytes,
    hub: _core.Hub,
    deadline: float,
) -> None:
    me = world.rank
    host = configs[me].host
    above = {peer for peer in peers if peer > me}
    near = {peer for peer in above if configs[peer].host == host}
    listeners: list[tuple[Listener, set[int]]] = []

    def refused() -> None:
        _check_refused(world, prefix)

    try:
        # One listener for each way in which peers come; the key tells a peer which is meant for it.
        for kind, expected in (("unix", near), ("tcp", above - near)):
            if expected:
                listener = _listen(me, kind)
                listeners.append((listener, expected))
                world.publish(f"{prefix}/{kind}/{me}", json.dumps(listener.address))
        for peer in (peer for peer in peers if peer < me):
            key = f"{prefix}/{'unix' if configs[peer].host == host else 'tcp'}/{peer}"
            where = json.loads(read_all(world, prefix, {peer: key}, deadline)[peer])
            address: Address = where if isinstance(where, str) else (str(where[0]), int(where[1]))
            hub.add_peer(peer, connect(me, peer, address, secret, deadline).detach())
        for listener, expected in listeners:
            for peer, connection in listener.accept(expected, secret, deadline, refused).items():
                hub.add_peer(peer, connection.detach())
    finally:
        for listener, _ in listeners:
            listener.close()
