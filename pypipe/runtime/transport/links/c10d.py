"""The c10d link: messages over the process group's own backend, for ranks that shared memory cannot reach.

The tag of each message and its layout travel over the control socket, the bytes through isend and irecv of
torch.distributed. So the receiver knows the size before it receives, and any backend will do.
"""

from __future__ import annotations

from typing import Any

import torch

from pypipe.program import Link
from pypipe.runtime.transport.links.c10d_channels import C10dReceiveChannel, C10dSendChannel
from pypipe.runtime.transport.links.c10d_transfers import Route
from pypipe.runtime.transport.links.transport import Ends, Place, Transport

__all__ = ["C10dTransport"]

# Far from the tags that a trainer uses for messages of its own in the same group.
_FIRST_TAG = 1 << 29


class C10dTransport(Transport):
    """torch.distributed, over the backend of the pipeline's own process group."""

    name = "c10d"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._channels: list[C10dSendChannel | C10dReceiveChannel] = []

    @classmethod
    def reaches(cls, ends: Ends) -> bool:
        return True

    @classmethod
    def problem(cls, link: Link, ends: Ends, *, chosen: bool) -> str | None:
        if all(config.group for config in ends):
            return None
        return (
            f"messages from rank {link.source_rank} to rank {link.target_rank} go through torch.distributed, as "
            + ("PYPIPE_LINK=c10d asks" if chosen else "shared memory does not reach")
            + ": call torch.distributed.init_process_group() before the first step"
        )

    def open(self, number: int, link: Link, slots: dict[int, int], *, sends: bool) -> None:
        pass  # the process group is there already

    def _route(self, peer: int, place: Place) -> Route:
        # Pipelines of one set of ranks are numbered alike on all of them; channels of one program are few.
        tag = _FIRST_TAG + (self._world.rendezvous() * 4096 + place.number) % (1 << 29)
        # Between devices of two kinds messages go through the hosts' memory.
        same = self._rendezvous.configs[peer].device == self._device.type
        buffers = self._device if same else torch.device("cpu")
        return Route(
            self._hub, self._world.group, peer, place.number, tag, place.slots, self._device, buffers, self._wait_policy
        )

    def send_channel(self, place: Place) -> C10dSendChannel:
        channel = C10dSendChannel(self._route(place.link.target_rank, place), *place.sent)
        self._channels.append(channel)
        return channel

    def receive_channel(self, place: Place) -> C10dReceiveChannel:
        channel = C10dReceiveChannel(self._route(place.link.source_rank, place), *place.sent)
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels = []
