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
from typing import Any

import torch

from pypipe import _core
from pypipe.errors import ConfigurationError
from pypipe.program import Channel, Link
from pypipe.runtime import environment
from pypipe.runtime.diagnostics import failure
from pypipe.runtime.diagnostics.recorder import SUFFIX, Recorder
from pypipe.runtime.rendezvous.meeting import Card, Meeting, meet, refuse
from pypipe.runtime.rendezvous.world import World
from pypipe.runtime.transport.channels import ReceiveChannel, SendChannel
from pypipe.runtime.transport.links.registry import CHOICES, Carrier, carrier_of, make

__all__ = ["Connection"]

# A wait of some tens of microseconds is cheaper to spin through than to sleep through, but only on a core of one's
# own: with more ranks than cores, whoever spins keeps the one that is waited for from running. When a wait should be
# about to end, as in the steps before, a waiter polls for up to so many seconds, and yields the core as it does.
_SPINS_ALONE, _SPINS_CROWDED = 2000, 20
_LONGEST_SPIN = 2e-3


class Connection:
    """One rank's end of a pipeline: control sockets, links and channels.

    Args:
        world: the ranks.
        device: where the stages of this rank live.
        links: for each channel, the link that carries it; the same on all ranks.
        slots: for each channel, how many messages may be alive at once; the same on all ranks.
        card: what must be equal on all ranks, by name (JSON values).
        compare: raises ConfigurationError where cards do not fit together.
        timeout: seconds that any wait may take.
        checksum: whether messages carry checksums; the same on all ranks.

    Attributes:
        senders, receivers: this rank's ends of the channels.
        issue: ends a run of transfers that are held back to be issued together; None where none are.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        links: Mapping[Channel, Link],
        slots: Mapping[Channel, int],
        card: Card,
        compare: Any,
        timeout: float,
        checksum: bool = False,
    ) -> None:
        self._checksum = checksum
        try:
            choice = environment.read("PYPIPE_LINK", CHOICES)
        except ConfigurationError as error:
            problem = f"rank {world.rank}: {error}"
            refuse(world, problem)
            raise ConfigurationError(problem) from None
        card = {**card, "link": choice, "device": device.type, "group": world.group is not None}
        links = {channel: links[channel] for channel in sorted(links)}
        peers = {rank for link in links.values() if world.rank in _ends(link) for rank in _ends(link)}
        # News go round in both directions, so that one rank that is stopped keeps them from nobody.
        peers |= {(world.rank + 1) % world.size, (world.rank - 1) % world.size}
        self.world = world
        ways: dict[Link, str] = {}

        def fit(cards: Sequence[Card]) -> None:
            compare(cards)
            ways.update(_ways(links.values(), cards, checksum))

        meeting = meet(world, card, fit, peers - {world.rank}, timeout)
        self.hub = meeting.hub
        self.cards: Sequence[Card] = meeting.cards
        """What each rank has said of itself."""
        self.prefix = meeting.prefix
        """Of keys in the store that are this pipeline's."""
        self.recorder = _recorder(world.rank, meeting.identity)
        self.hub.set_action_log(self.recorder.core)
        self.hub.start()
        _hubs.add(self.hub)
        self.senders: dict[Channel, SendChannel] = {}
        self.receivers: dict[Channel, ReceiveChannel] = {}
        self.issue: Callable[[], None] | None = None
        carriers: dict[str, Carrier] = {}
        self._finalizer = weakref.finalize(self, _close, carriers, self.hub, self.recorder)
        _open_connections.add(self)
        _tell_at_exit()
        try:
            self._open(meeting, carriers, links, ways, slots, device, timeout)
        except BaseException as error:
            public: BaseException = error
            if isinstance(error, _core.CoreError):
                public = failure.convert(error, self.hub, world.rank, None, timeout, "the start of the pipeline")
            failure.report(self.hub, world.rank, None, public, "the start of the pipeline")
            self.close()
            try:
                raise public from None
            finally:
                del public

    def tell(self, error: BaseException) -> None:
        """Tells the other ranks what ends this rank's part outside step() and eval()."""
        if not isinstance(error, SystemExit):
            doing = "a line of its own script, outside step() and eval()"
            begun = self.recorder.core.status().step
            failure.report(self.hub, self.world.rank, None, error, doing, step=begun + 1)

    def close(self) -> None:
        """Closes the links, says goodbye to the neighbours and closes the sockets. Idempotent; never raises."""
        self._finalizer()
        self.senders, self.receivers = {}, {}

    def _open(
        self,
        meeting: Meeting,
        carriers: dict[str, Carrier],
        links: Mapping[Channel, Link],
        ways: Mapping[Link, str],
        slots: Mapping[Channel, int],
        device: torch.device,
        timeout: float,
    ) -> None:
        me, cards = self.world.rank, meeting.cards
        here = sum(card["host"] == cards[me]["host"] for card in cards)
        crowded = here > len(os.sched_getaffinity(0))
        wait_policy = _core.WaitPolicy(timeout, _SPINS_CROWDED if crowded else _SPINS_ALONE, _LONGEST_SPIN)
        wait_policy = self.hub.prolonging(wait_policy, self.world.size)
        for peer in meeting.peers:
            if cards[peer]["host"] == cards[me]["host"]:
                self.hub.share_record(peer, wait_policy)
        numbers = {channel: number for number, channel in enumerate(links)}
        # One order on all ranks: whoever waits at a link waits for a rank that is busy with an earlier one.
        for number, (link, way) in enumerate(ways.items()):
            if me not in _ends(link):
                continue
            if way not in carriers:
                carriers[way] = make(way, self.world, meeting, device, wait_policy)
            on_it = {numbers[channel]: slots[channel] for channel, its_link in links.items() if its_link == link}
            carriers[way].open(number, link, on_it, sends=link.source_rank == me)
        held = [carrier.issue for carrier in carriers.values() if carrier.holds_back]
        self.issue = held[0] if held else None  # only NCCL's does
        for channel, link in links.items():
            carrier, number, count = carriers.get(ways[link]), numbers[channel], slots[channel]
            if me not in _ends(link) or carrier is None:
                continue
            if link.source_rank == me:
                sender = carrier.send_port(link, number, count)
                self.senders[channel] = SendChannel(sender, channel.source_stage, channel.kind, self._checksum)
            else:
                receiver = carrier.receive_port(link, number, count)
                self.receivers[channel] = ReceiveChannel(receiver, channel.source_stage, channel.kind, self._checksum)


def _ways(links: Iterable[Link], cards: Sequence[Card], checksum: bool) -> dict[Link, str]:
    """Each link's carrier. All ranks decide for all links, so that what cannot be is an error on every rank."""
    ways = {link: carrier_of(link, cards) for link in sorted(set(links))}
    if checksum and "nccl" in ways.values():
        raise ConfigurationError(
            'check="checksum" is for messages that pass through the hosts: over NCCL each would wait for the device; '
            "leave it out, or carry them by PYPIPE_LINK=c10d while you look for the fault"
        )
    return ways


def _close(carriers: Mapping[str, Carrier], hub: _core.Hub, recorder: Recorder) -> None:
    # NCCL's last: its end begins with a goodbye to all neighbours, and what others carry must be with them by then.
    try:
        for way in sorted(carriers, key=lambda way: way == "nccl"):
            carriers[way].close()
    finally:
        hub.close()
        if hub.cause() is None:
            recorder.core.discard()


def _recorder(rank: int, identity: str) -> Recorder:
    """The rank's record; in a file where the user wants one. That there is none must not keep anybody from training."""
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
    """Where an exception has ended the script, it is no goodbye: the other ranks hear which one."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and not hasattr(sys, "ps1"):  # at a prompt, it may be of long ago
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
