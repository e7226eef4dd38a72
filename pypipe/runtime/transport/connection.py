"""What a schedule holds once its ranks have met: a hub, and the channels that its programs use."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from pypipe import _core
from pypipe.errors import ConfigurationError
from pypipe.program import Channel, Link
from pypipe.runtime import environment
from pypipe.runtime.diagnostics import failure
from pypipe.runtime.diagnostics.recorder import SUFFIX, Recorder
from pypipe.runtime.rendezvous.config import Config
from pypipe.runtime.rendezvous.exchange import Rendezvous, meet, refuse
from pypipe.runtime.rendezvous.world import World
from pypipe.runtime.transport.channel import ReceiveChannel, SendChannel
from pypipe.runtime.transport.links.communicators import multiprocessors
from pypipe.runtime.transport.links.registry import CHOICES, transport_of
from pypipe.runtime.transport.links.transport import Place, Transport

__all__ = ["Connection", "connect"]

# Waits of some tens of microseconds are cheaper to spin through than to sleep through, but only on a core of one's own:
# with more ranks than cores, a spinning rank keeps the one that it waits for from running. When a wait is about to end,
# going by earlier steps, a waiter polls for up to this many seconds, and yields the core as it does.
_SPINS_ALONE, _SPINS_CROWDED = 2000, 20
_LONGEST_SPIN = 2e-3


def connect(
    world: World,
    device: torch.device,
    links: Mapping[Channel, Link],
    slots_of: Callable[[bool], Mapping[Channel, int]],
    config: Config,
    compare: Callable[[Sequence[Config]], None],
    timeout: float,
    *,
    checksum: bool = False,
    further: Callable[[Sequence[Config]], Mapping[Channel, Link]] | None = None,
) -> Connection:
    """Meets the other ranks of the pipeline and opens the links to them.

    Args:
        world: the ranks.
        device: where the stages of this rank live.
        links: for each channel, the link that carries it; the same on all ranks.
        slots_of: is told, once it is known, whether a transfer may block both of its ranks until it is over, as on
            GPUs; returns for each channel how many messages may be alive at once, the same on all ranks.
        config: what this rank was built with.
        compare: raises ConfigurationError where configs do not fit together.
        timeout: seconds that any wait may take.
        checksum: whether messages carry checksums; the same on all ranks.
        further: the channels, and their links, that follow from what the ranks were built with, called after `compare`;
            for messages of which one is in use at a time.

    Raises:
        ConfigurationError: the ranks do not fit together, or a link cannot be opened.
        PeerLost: a rank's process has ended.
        PipelineTimeout: a rank did not come.
    """
    try:
        choice = environment.read("PYPIPE_LINK", CHOICES)
    except ConfigurationError as error:
        problem = f"rank {world.rank}: {error}"
        refuse(world, problem)
        raise ConfigurationError(problem) from None
    config = replace(
        config,
        link=choice,
        device=device.type,
        multiprocessors=multiprocessors(device, choice),
        group=world.group is not None,
    )
    ways: dict[Link, type[Transport]] = {}
    more: dict[Channel, Link] = {}

    def fit(configs: Sequence[Config]) -> None:
        compare(configs)
        more.update(further(configs) if further is not None else {})
        ways.update(_transports((*links.values(), *more.values()), configs, checksum))

    def neighbours() -> set[int]:
        peers = {rank for link in ways if world.rank in _ends(link) for rank in _ends(link)}
        # News travels round the ring in both directions, so that one stopped rank does not keep it from the others.
        return (peers | {(world.rank + 1) % world.size, (world.rank - 1) % world.size}) - {world.rank}

    rendezvous = meet(world, config, fit, neighbours, timeout)
    connection = Connection(world, rendezvous, _recorder(world.rank, rendezvous.identity))
    connection.start()
    try:
        wait_policy = connection.wait_policy(timeout)
        slots = dict.fromkeys(more, 2) | dict(slots_of(any(way.synchronous for way in ways.values())))
        places = [
            Place(channel, link, number, slots[channel], checksum)
            for number, (channel, link) in enumerate(sorted({**more, **links}.items()))
        ]
        connection.open(places, ways, device, wait_policy)
    except BaseException as error:
        public: BaseException = error
        if isinstance(error, _core.CoreError):
            public = failure.convert(error, connection.hub, world.rank, None, timeout, "the start of the pipeline")
        failure.report(connection.hub, world.rank, None, public, "the start of the pipeline")
        connection.close()
        try:
            raise public from None
        finally:
            del public
    return connection


class Connection:
    """One rank's end of a pipeline: control sockets, links and channels. `connect` makes one.

    Args:
        world: the ranks.
        rendezvous: what came of the ranks' exchange.
        recorder: of what this rank does.

    Attributes:
        hub: the control sockets.
        configs: what each rank has said of itself.
        prefix: of this pipeline's keys in the store.
        recorder: of what this rank does.
        senders, receivers: this rank's ends of the channels.
        issue: ends a run of transfers that are held back to be issued together; None where none are.
        carried_by: the name of what carries each of the channels.
    """

    def __init__(self, world: World, rendezvous: Rendezvous, recorder: Recorder) -> None:
        self._world = world
        self._rendezvous = rendezvous
        self.hub = rendezvous.hub
        self.configs: Sequence[Config] = rendezvous.configs
        self.prefix = rendezvous.prefix
        self.recorder = recorder
        self.senders: dict[Channel, SendChannel] = {}
        self.receivers: dict[Channel, ReceiveChannel] = {}
        self.issue: Callable[[], None] | None = None
        self.carried_by: dict[Channel, str] = {}
        self._transports: list[Transport] = []
        self._finalizer = weakref.finalize(self, _close, self._transports, self.hub, self.recorder)

    def start(self) -> None:
        """Starts the control sockets' thread; from now on the end of this process is told to the other ranks."""
        self.hub.set_action_log(self.recorder.core)
        self.hub.start()
        _hubs.add(self.hub)
        _open_connections.add(self)
        _tell_at_exit()

    def wait_policy(self, timeout: float) -> _core.WaitPolicy:
        """How this rank waits: for how long, and how it polls.

        Args:
            timeout: seconds that any wait may take.
        """
        me, configs = self._world.rank, self.configs
        here = sum(config.host == configs[me].host for config in configs)
        crowded = here > len(os.sched_getaffinity(0))
        wait_policy = _core.WaitPolicy(timeout, _SPINS_CROWDED if crowded else _SPINS_ALONE, _LONGEST_SPIN)
        return self.hub.prolonging(wait_policy, self._world.size)

    def open(
        self,
        places: Sequence[Place],
        ways: Mapping[Link, type[Transport]],
        device: torch.device,
        wait_policy: _core.WaitPolicy,
    ) -> None:
        """Opens this rank's links and makes its channels.

        Args:
            places: all channels of the pipeline.
            ways: what carries each link, in one order on all ranks.
            device: where the stages of this rank live.
            wait_policy: how long to wait.
        """
        me, configs = self._world.rank, self.configs
        for peer in self._rendezvous.peers:
            if configs[peer].host == configs[me].host:
                self.hub.share_record(peer, wait_policy)
        opened: dict[type[Transport], Transport] = {}
        carried = {way: [link for link, taken in ways.items() if taken is way] for way in ways.values()}
        # One order on all ranks: a rank that waits at a link waits for one that is busy with an earlier link.
        for number, (link, way) in enumerate(ways.items()):
            if me not in _ends(link):
                continue
            if way not in opened:
                opened[way] = way(self._world, self._rendezvous, carried[way], device, wait_policy)
                self._transports.append(opened[way])
            slots = {place.number: place.slots for place in places if place.link == link}
            opened[way].open(number, link, slots, sends=link.source_rank == me)
        for transport in self._transports:
            transport.connect()
        held_back = [transport.issue for transport in self._transports if transport.holds_back]
        self.issue = held_back[0] if held_back else None  # only NCCL's does
        for place in places:
            if me not in _ends(place.link):
                continue
            transport = opened[ways[place.link]]
            self.carried_by[place.channel] = transport.name
            if place.link.source_rank == me:
                self.senders[place.channel] = transport.send_channel(place)
            else:
                self.receivers[place.channel] = transport.receive_channel(place)

    def tell(self, error: BaseException) -> None:
        """Tells the other ranks what ends this rank's part outside step() and eval()."""
        if not isinstance(error, SystemExit):
            doing = "a line of its own script, outside step() and eval()"
            begun = self.recorder.core.status().step
            failure.report(self.hub, self._world.rank, None, error, doing, step=begun + 1)

    def close(self) -> None:
        """Closes the links, says goodbye to the neighbours and closes the sockets. Idempotent; never raises."""
        self._finalizer()
        self.senders, self.receivers = {}, {}


def _transports(links: Iterable[Link], configs: Sequence[Config], checksum: bool) -> dict[Link, type[Transport]]:
    """What carries each link. All ranks decide for all links, so that what cannot be is an error on every rank."""
    ways = {link: transport_of(link, configs) for link in sorted(set(links))}
    if checksum and not all(way.through_hosts for way in ways.values()):
        raise ConfigurationError(
            'check="checksum" is for messages that pass through the hosts: over NCCL each would wait for the device; '
            "leave it out, or carry them by PYPIPE_LINK=c10d while you look for the fault"
        )
    return ways


def _close(transports: Sequence[Transport], hub: _core.Hub, recorder: Recorder) -> None:
    try:
        for transport in sorted(transports, key=lambda each: each.closes_last):
            transport.close()
    finally:
        hub.close()
        if hub.cause() is None:
            recorder.core.discard()


def _recorder(rank: int, identity: str) -> Recorder:
    """The rank's record; in a file where the user wants one. If that cannot be written, training goes on without."""
    folder = environment.read("PYPIPE_RECORD_DIR")
    if folder:
        try:
            os.makedirs(folder, exist_ok=True)
            return Recorder(rank, path=os.path.join(folder, f"{identity}-rank-{rank}{SUFFIX}"))
        except (OSError, _core.CoreError) as error:
            warnings.warn(f"PYPIPE_RECORD_DIR={folder!r}: no record is kept there: {error}", stacklevel=2)
    return Recorder(rank)


def _ends(link: Link) -> tuple[int, int]:
    return link.source_rank, link.target_rank


_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _tell_why_the_script_ended() -> None:
    """Tells the other ranks which exception has ended the script, where one has: that is not a goodbye."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and not hasattr(sys, "ps1"):  # at a prompt, it may be from long ago
        for connection in list(_open_connections):
            with contextlib.suppress(Exception):
                connection.tell(error)


@functools.cache
def _tell_at_exit() -> None:
    # What is registered last runs first: before weakref's finalizers, of which there is one by now.
    atexit.register(_tell_why_the_script_ended)


_hubs: weakref.WeakSet[_core.Hub] = weakref.WeakSet()


def _abandon_all() -> None:
    for hub in list(_hubs):
        with contextlib.suppress(Exception):
            hub.abandon()


# A forked child (a data loader's worker) must not keep the sockets open: they tell of this process's death.
os.register_at_fork(after_in_child=_abandon_all)
