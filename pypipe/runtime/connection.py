"""What a schedule holds once its ranks have met: a hub, and the channels that its programs use."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pypipe import _core
from pypipe.errors import ConfigurationError
from pypipe.program import Channel, Kind, Link
from pypipe.runtime import environment
from pypipe.runtime.c10d import C10dReceivePort, C10dSendPort, Route
from pypipe.runtime.channels import ReceiveChannel, ReceivePort, SendChannel, SendPort
from pypipe.runtime.rendezvous import Card, meet
from pypipe.runtime.shm import CoreReceivePort, CoreSendPort
from pypipe.runtime.world import World

__all__ = ["Connection"]

# A wait of some tens of microseconds is cheaper to spin through than to sleep through, but only on a core of one's
# own: with more ranks than cores, whoever spins keeps the one that is waited for from running.
_SPINS_ALONE = 2000
_SPINS_CROWDED = 20


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
    ) -> None:
        choice = environment.read("PYPIPE_LINK", ("auto", "shm", "c10d"))
        card = {**card, "link": choice, "device": device.type}
        links = {channel: links[channel] for channel in sorted(links)}
        peers = {rank for link in links.values() if world.rank in _ends(link) for rank in _ends(link)}
        self.world = world
        meeting = meet(world, card, compare, peers - {world.rank}, timeout)
        self.hub = meeting.hub
        _hubs.add(self.hub)
        self._finalizer = weakref.finalize(self, self.hub.close)
        self.senders: dict[Channel, SendChannel] = {}
        self.receivers: dict[Channel, ReceiveChannel] = {}
        try:
            self._open(meeting.cards, meeting.same_host, links, slots, device, timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Says goodbye to the neighbours and closes the sockets. Idempotent; never raises."""
        self._finalizer()

    def _open(
        self,
        cards: Sequence[Card],
        same_host: Any,
        links: Mapping[Channel, Link],
        slots: Mapping[Channel, int],
        device: torch.device,
        timeout: float,
    ) -> None:
        me = self.world.rank
        here = sum(card["host"] == cards[me]["host"] for card in cards)
        crowded = here > len(os.sched_getaffinity(0))
        patience = _core.Patience(timeout, _SPINS_CROWDED if crowded else _SPINS_ALONE)
        shared = {link: self._is_shared(cards, same_host, link) for link in set(links.values()) if me in _ends(link)}
        capacity = {
            link: sum(slots[channel] for channel, its_link in links.items() if its_link == link) for link in shared
        }
        numbers = {link: number for number, link in enumerate(sorted(set(links.values())))}
        outgoing = [link for link in sorted(shared) if shared[link] and link.source_rank == me]
        incoming = [link for link in sorted(shared) if shared[link] and link.target_rank == me]
        # Sending ends first: they wait for nobody.
        send_links = {
            link: _core.ShmSendLink(self.hub, link.target_rank, numbers[link], capacity[link], patience)
            for link in outgoing
        }
        receive_links = {
            link: _core.ShmReceiveLink(self.hub, link.source_rank, numbers[link], capacity[link], patience)
            for link in incoming
        }
        for number, (channel, link) in enumerate(links.items()):
            if link not in shared:
                continue
            kind = ord("F" if channel.kind is Kind.F else "B")
            peer = link.target_rank if link.source_rank == me else link.source_rank
            count = slots[channel]
            route = None if shared[link] else self._route(peer, number, count, device, patience)
            if link.source_rank == me:
                send_port: SendPort
                if route is not None:
                    send_port = C10dSendPort(route)
                else:
                    sender = _core.SendChannel(self.hub, send_links[link], peer, number, count)
                    send_port = CoreSendPort(sender, patience)
                self.senders[channel] = SendChannel(send_port, channel.source_stage, kind)
            else:
                receive_port: ReceivePort
                if route is not None:
                    receive_port = C10dReceivePort(route)
                else:
                    receiver = _core.ReceiveChannel(self.hub, receive_links[link], peer, number, count)
                    receive_port = CoreReceivePort(receiver, patience)
                self.receivers[channel] = ReceiveChannel(receive_port, channel.source_stage, kind)

    @staticmethod
    def _is_shared(cards: Sequence[Card], same_host: Any, link: Link) -> bool:
        """Whether shared memory carries this link; both its ends decide alike."""
        ends = (cards[link.source_rank], cards[link.target_rank])
        possible = ends[0]["host"] == ends[1]["host"] and all(card["device"] == "cpu" for card in ends)
        choices = {card["link"] for card in cards}
        if "c10d" in choices:
            return False
        if "shm" in choices and not possible:
            raise ConfigurationError(
                f"PYPIPE_LINK=shm, but shared memory does not reach from rank {link.source_rank} to rank "
                f"{link.target_rank}: they are on different hosts, or a stage is not on the CPU"
            )
        return possible

    def _route(self, peer: int, channel: int, slots: int, device: torch.device, patience: _core.Patience) -> Route:
        if self.world.group is None:
            raise ConfigurationError(
                f"shared memory does not reach from rank {self.world.rank} to rank {peer}, so their messages go "
                "through torch.distributed: call torch.distributed.init_process_group() before the first step"
            )
        # Meetings of one set of ranks are numbered alike on all of them; channels of one program are few.
        tag = (self.world.meetings() * 4096 + channel) % (1 << 30)
        return Route(self.hub, self.world.group, peer, channel, tag, slots, device, patience)


def _ends(link: Link) -> tuple[int, int]:
    return link.source_rank, link.target_rank


_hubs: weakref.WeakSet[_core.Hub] = weakref.WeakSet()


def _abandon_all() -> None:
    for hub in list(_hubs):
        with contextlib.suppress(Exception):
            hub.abandon()


# A forked child (a data loader's worker) must not keep the sockets open: they tell of this process's death.
os.register_at_fork(after_in_child=_abandon_all)
