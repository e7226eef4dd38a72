"""What carries messages between two ranks: shared memory, NCCL, or torch.distributed (c10d).

A carrier opens links, in one order that all ranks keep, and makes the ports of the channels on them.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pypipe import _core
from pypipe.errors import ConfigurationError
from pypipe.program import Kind, Link
from pypipe.runtime import environment, libraries
from pypipe.runtime.rendezvous.meeting import Card, Meeting, read_all
from pypipe.runtime.transport.channels import ReceivePort, SendPort
from pypipe.runtime.transport.links.c10d import C10dReceivePort, C10dSendPort, Route
from pypipe.runtime.transport.links.nccl import Memory, NcclReceivePort, NcclSendPort
from pypipe.runtime.transport.links.shm import CoreReceivePort, CoreSendPort

__all__ = ["CHOICES", "Carrier", "carrier_of", "make", "single_communicator"]

CHOICES = ("auto", "shm", "nccl", "c10d")
"""What PYPIPE_LINK may say."""


class Carrier(Protocol):
    """One way to move messages, for all links of a rank that go that way.

    Attributes:
        holds_back: whether transfers go out with issue() only.
    """

    @property
    def holds_back(self) -> bool: ...

    def open(self, number: int, link: Link, channels: dict[int, int], *, sends: bool) -> None:
        """Opens this rank's end of a link. `channels` gives the slots of each channel on it, by number."""

    def send_port(self, link: Link, channel: int, slots: int) -> SendPort:
        """The sending end of a channel on an open link."""

    def receive_port(self, link: Link, channel: int, slots: int) -> ReceivePort:
        """The receiving end of a channel on an open link."""

    def issue(self) -> None:
        """Ends a run of transfers: what was held back, where `holds_back`, goes out."""

    def close(self) -> None:
        """Before the control sockets close. Raises nothing but KeyboardInterrupt.

        NCCL's says goodbye to all neighbours first, so it is the last.
        """


def carrier_of(link: Link, cards: Sequence[Card]) -> str:
    """Which carrier a link has; every rank decides alike. Raises ConfigurationError where there can be none."""
    ends = (cards[link.source_rank], cards[link.target_rank])
    devices = {card["device"] for card in ends}
    shm = ends[0]["host"] == ends[1]["host"] and devices == {"cpu"}
    choices = {card["link"] for card in cards} - {"auto"}
    if len(choices) > 1:
        raise ConfigurationError(f"the ranks' PYPIPE_LINK disagree: {', '.join(sorted(choices))}; give all the same")
    choice = choices.pop() if choices else "auto"
    if choice == "shm" and not shm:
        raise ConfigurationError(
            f"PYPIPE_LINK=shm, but shared memory does not reach from rank {link.source_rank} to rank "
            f"{link.target_rank}: they are on different hosts, or a stage is not on the CPU"
        )
    way = str(choice) if choice != "auto" else "shm" if shm else "nccl" if devices == {"cuda"} else "c10d"
    if way == "c10d" and not all(card["group"] for card in ends):
        raise ConfigurationError(
            f"messages from rank {link.source_rank} to rank {link.target_rank} go through torch.distributed, as "
            + ("PYPIPE_LINK=c10d asks" if choice == "c10d" else "shared memory does not reach")
            + ": call torch.distributed.init_process_group() before the first step"
        )
    return way


# NCCL's and the driver's first releases in which the host's order of calls is the order of the communicators; an older
# driver has them run one after another, in which case a receive that is posted early stops everything behind it.
_ORDERED_NCCL, _ORDERED_DRIVER = 22600, 12030


def single_communicator(device: torch.device) -> bool:
    """Whether two ranks have one NCCL communicator for all their links, as their programs then have to know.

    Raises ConfigurationError where PYPIPE_NCCL_COMMUNICATORS is none of its choices.
    """
    choice = environment.read("PYPIPE_NCCL_COMMUNICATORS", ("auto", "link", "pair"))
    if device.type != "cuda" and environment.read("PYPIPE_LINK", CHOICES) != "nccl":
        return False
    if choice != "auto":
        return choice == "pair"
    try:
        return libraries.nccl().version < _ORDERED_NCCL or libraries.cuda().version < _ORDERED_DRIVER
    except ConfigurationError:
        return False  # said when the ranks connect, if a link is NCCL's at all


def make(name: str, world: Any, meeting: Meeting, device: torch.device, wait_policy: _core.WaitPolicy) -> Carrier:
    """The carrier of that name."""
    if name == "shm":
        return _Shm(meeting.hub, wait_policy)
    if name == "nccl":
        return _Nccl(world, meeting, device, wait_policy)
    return _C10d(world, meeting, device, wait_policy)


class _Shm:
    holds_back = False

    def __init__(self, hub: _core.Hub, wait_policy: _core.WaitPolicy) -> None:
        self._hub = hub
        self._wait_policy = wait_policy
        self._links: dict[Link, Any] = {}

    def open(self, number: int, link: Link, channels: dict[int, int], *, sends: bool) -> None:
        kind = _core.ShmSendLink if sends else _core.ShmReceiveLink
        peer = link.target_rank if sends else link.source_rank
        self._links[link] = kind(self._hub, peer, number, sum(channels.values()), self._wait_policy)

    def send_port(self, link: Link, channel: int, slots: int) -> SendPort:
        core = _core.ChannelSender(self._hub, self._links[link], link.target_rank, channel, slots)
        return CoreSendPort(core, self._wait_policy)

    def receive_port(self, link: Link, channel: int, slots: int) -> ReceivePort:
        core = _core.ChannelReceiver(self._hub, self._links[link], link.source_rank, channel, slots)
        return CoreReceivePort(core, self._wait_policy)

    def issue(self) -> None:
        pass

    def close(self) -> None:
        self._links = {}  # the kernel frees the memory with its last mapping


def _transfer_limit(timeout: float) -> float:
    """Seconds for a transfer over NCCL: a host that waits gives up first, at what it cannot do."""
    return timeout + max(5.0, 0.1 * timeout)


def max_ctas() -> int:
    """The most thread blocks of a communicator.

    Raises ConfigurationError where PYPIPE_NCCL_MAX_CTAS is no such number.
    """
    value = environment.read("PYPIPE_NCCL_MAX_CTAS")
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 64):  # NCCL's own limit
        raise ConfigurationError(f"PYPIPE_NCCL_MAX_CTAS={value!r}: it takes a whole number, 1 to 64")
    return int(value)


class _Nccl:
    _MIN_CTAS = 1
    _CLOSING_SECONDS = 10.0

    def __init__(self, world: Any, meeting: Meeting, device: torch.device, wait_policy: _core.WaitPolicy) -> None:
        self._world = world
        self._hub = meeting.hub
        self._prefix = meeting.prefix
        self._device = device
        self._wait_policy = wait_policy
        self._memory = Memory(device)
        self._links: dict[Link, Any] = {}
        self._edges: dict[Any, _core.NcclEdge] = {}
        self.holds_back = single_communicator(device)
        self._group = _core.NcclGroup() if self.holds_back else None
        self._watchdog: _core.NcclWatchdog | None = None
        self._cuda = libraries.cuda()
        self._nccl = libraries.nccl()
        if (problem := libraries.one_queue()) is not None:
            warnings.warn(problem, RuntimeWarning, stacklevel=2)
        # Before 2.26 NCCL knows no order among communicators; from then on the host's order counts, where this is set
        # (2.31 has it per communicator, which the core sets).
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.current_stream(device)  # makes the device's context current on this thread

    def open(self, number: int, link: Link, channels: dict[int, int], *, sends: bool) -> None:
        edge = self._edge(number, link)
        args = (self._hub, link.target_rank if sends else link.source_rank, number, edge, self._memory.allocate)
        if sends:
            self._links[link] = _core.NcclSendLink(*args, self._group)
        else:
            self._links[link] = _core.NcclReceiveLink(*args, list(channels.items()), self._group)

    def _edge(self, number: int, link: Link) -> _core.NcclEdge:
        """The link's own communicator; with a group, the one of its two ranks, made for the first of their links."""
        ends = [link.source_rank, link.target_rank]
        key: Any = link
        name = f"pypipe {'F' if link.kind is Kind.F else 'B'} {ends[0]}>{ends[1]}"
        if self._group is not None:
            ends.sort()
            key = tuple(ends)
            name = f"pypipe {ends[0]}-{ends[1]}"
        if key in self._edges:
            return self._edges[key]
        where = f"{self._prefix}/nccl/{number}"
        rank = ends.index(self._world.rank)
        if rank == 0:
            self._world.publish(where, self._nccl.unique_id().hex())
        deadline = time.monotonic() + self._wait_policy.timeout
        unique_id = bytes.fromhex(read_all(self._world, self._prefix, {ends[0]: where}, deadline)[ends[0]])
        edge = self._edges[key] = _core.NcclEdge(
            self._cuda,
            self._nccl,
            unique_id,
            rank,
            _core.NcclDirection.ONE_WAY if self._group is None else _core.NcclDirection.BOTH_WAYS,
            name,
            self._MIN_CTAS,
            max_ctas(),
            self._wait_policy,
        )
        return edge

    def issue(self) -> None:
        if self._group is not None:
            self._group.issue(self._wait_policy)

    def _watch(self) -> None:
        if self._watchdog is None:
            edges = list(self._edges.values())
            self._watchdog = _core.NcclWatchdog(
                self._hub, edges, _transfer_limit(self._wait_policy.timeout), self._world.size
            )

    def send_port(self, link: Link, channel: int, slots: int) -> SendPort:
        self._watch()
        core = _core.ChannelSender(self._hub, self._links[link], link.target_rank, channel, slots)
        return NcclSendPort(core, self._device, self._wait_policy)

    def receive_port(self, link: Link, channel: int, slots: int) -> ReceivePort:
        self._watch()
        core = _core.ChannelReceiver(self._hub, self._links[link], link.source_rank, channel, slots)
        return NcclReceivePort(core, self._memory, self._device, self._wait_policy)

    def close(self) -> None:
        if self._watchdog is not None:
            with contextlib.suppress(Exception):
                self._watchdog.close(_core.WaitPolicy(self._CLOSING_SECONDS))
        self._links, self._edges, self._group = {}, {}, None


# Far from the tags that a trainer uses for messages of its own in the same group.
_FIRST_TAG = 1 << 29


class _C10d:
    holds_back = False

    def __init__(self, world: Any, meeting: Meeting, device: torch.device, wait_policy: _core.WaitPolicy) -> None:
        self._world = world
        self._hub = meeting.hub
        self._devices = [card["device"] for card in meeting.cards]
        self._device = device
        self._wait_policy = wait_policy
        self._ports: list[C10dSendPort | C10dReceivePort] = []

    def open(self, number: int, link: Link, channels: dict[int, int], *, sends: bool) -> None:
        pass  # the process group is there already

    def _route(self, peer: int, channel: int, slots: int) -> Route:
        # Meetings of one set of ranks are numbered alike on all of them; channels of one program are few.
        tag = _FIRST_TAG + (self._world.meetings() * 4096 + channel) % (1 << 29)
        # Between devices of two kinds messages go through the hosts' memory.
        buffers = self._device if self._devices[peer] == self._device.type else torch.device("cpu")
        return Route(self._hub, self._world.group, peer, channel, tag, slots, self._device, buffers, self._wait_policy)

    def send_port(self, link: Link, channel: int, slots: int) -> SendPort:
        port = C10dSendPort(self._route(link.target_rank, channel, slots))
        self._ports.append(port)
        return port

    def receive_port(self, link: Link, channel: int, slots: int) -> ReceivePort:
        port = C10dReceivePort(self._route(link.source_rank, channel, slots))
        self._ports.append(port)
        return port

    def issue(self) -> None:
        pass

    def close(self) -> None:
        for port in self._ports:
            port.close()
        self._ports = []
