"""What every link offers: a transport opens this rank's ends of links and makes the channels on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from pypipe import _core
from pypipe.program import Channel, Kind, Link
from pypipe.runtime.rendezvous.config import Config
from pypipe.runtime.rendezvous.exchange import Rendezvous
from pypipe.runtime.rendezvous.world import World
from pypipe.runtime.transport.channel import ReceiveChannel, SendChannel

__all__ = ["Ends", "Place", "Transport"]

Ends = tuple[Config, Config]
"""What the two ranks of a link say of themselves, the sender first."""


class Place(NamedTuple):
    """One channel among those of its pipeline.

    Attributes:
        channel: the stage boundary.
        link: what carries it.
        number: the same at both ends, and no other channel's.
        slots: messages that may be under way or in use at once.
        checksum: whether messages carry checksums.
    """

    channel: Channel
    link: Link
    number: int
    slots: int
    checksum: bool

    @property
    def sent(self) -> tuple[int, Kind, bool]:
        """What is sent there: the sender's stage, its kind of message, and whether with checksums."""
        return self.channel.source_stage, self.channel.kind, self.checksum


class Transport(ABC):
    """One way to move messages, for all links of a rank that take it.

    Args:
        world: the ranks.
        rendezvous: what came of the ranks' exchange.
        links: all of the pipeline's that take it, those of other ranks too, in one order on all ranks.
        device: where the stages of this rank live.
        wait_policy: how long to wait.
    """

    name: ClassVar[str]
    """As PYPIPE_LINK has it."""
    through_hosts: ClassVar[bool] = True
    """Whether messages pass through the hosts' memory, where checksums can be taken without a wait for a device."""
    synchronous: ClassVar[bool] = False
    """Whether a transfer may block both of its ranks until it is over, so that programs have to be lowered for it."""
    closes_last: ClassVar[bool] = False
    """Whether the links of all other transports are closed before."""

    def __init__(
        self,
        world: World,
        rendezvous: Rendezvous,
        links: Sequence[Link],
        device: torch.device,
        wait_policy: _core.WaitPolicy,
    ) -> None:
        self._world = world
        self._rendezvous = rendezvous
        self._hub = rendezvous.hub
        self._all_links = links
        self._device = device
        self._wait_policy = wait_policy
        self.holds_back = False
        """Whether transfers go out with issue() only."""

    @classmethod
    @abstractmethod
    def reaches(cls, ends: Ends) -> bool:
        """Whether it is to be chosen for a link, where the transports before it in the registry are not."""

    @classmethod
    @abstractmethod
    def problem(cls, link: Link, ends: Ends, *, chosen: bool) -> str | None:
        """What keeps it from carrying a link; the same on every rank.

        Args:
            link: the link.
            ends: its ranks.
            chosen: whether PYPIPE_LINK asks for this transport.
        """

    @abstractmethod
    def open(self, number: int, link: Link, slots: dict[int, int], *, sends: bool) -> None:
        """Opens this rank's end of a link; all ranks open their links in one order.

        Args:
            number: of the link.
            link: the link.
            slots: of each channel on it, by the channel's number.
            sends: whether this rank sends.
        """

    def connect(self) -> None:
        """Connects the links that were opened, where open() has left that: all ranks come here after their last one."""

    @abstractmethod
    def send_channel(self, place: Place) -> SendChannel:
        """The sending end of a channel on an open link."""

    @abstractmethod
    def receive_channel(self, place: Place) -> ReceiveChannel:
        """The receiving end of a channel on an open link."""

    def issue(self) -> None:
        """Ends a run of transfers: what was held back, where `holds_back`, goes out."""

    @abstractmethod
    def close(self) -> None:
        """Closes the links, before the control sockets close. Raises nothing but KeyboardInterrupt."""
