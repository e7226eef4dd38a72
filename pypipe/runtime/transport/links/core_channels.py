"""What channels over the core's own links share, in shared memory as on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pypipe import _core
from pypipe.program import Kind
from pypipe.runtime.transport.channel import ReceiveChannel, SendChannel, Tag

__all__ = ["CoreReceiveChannel", "CoreSendChannel"]


class CoreSendChannel(SendChannel):
    """The sending end of a channel of the core.

    Args:
        core: the core's end.
        wait_policy: how long to wait.
        stage, kind, checksum: as for SendChannel.
    """

    def __init__(
        self, core: _core.ChannelSender, wait_policy: _core.WaitPolicy, stage: int, kind: Kind, checksum: bool = False
    ) -> None:
        super().__init__(stage, kind, checksum)
        self._core = core
        self._wait_policy = wait_policy

    @property
    def counters(self) -> dict[str, int]:
        return self._core.counters

    def announce(self, description: str, sizes: list[int], forgotten: int) -> _core.OutgoingLayout:
        return self._core.announce(description, sizes, forgotten, self._wait_policy)

    def _transfer(self, layout: _core.OutgoingLayout, tag: Tag, tensors: Sequence[Tensor], stream: int) -> int:
        """Sends what the stream will have written into the tensors; returns the message's number."""
        return self._core.send(
            layout,
            tag.stage,
            tag.kind,
            tag.microbatch,
            tag.run,
            tag.rows,
            tag.batch_rows,
            [tensor.data_ptr() for tensor in tensors],
            stream,
            self._wait_policy,
        )


class CoreReceiveChannel(ReceiveChannel):
    """The receiving end of a channel of the core.

    Args:
        core: the core's end.
        wait_policy: how long to wait.
        source_stage, kind, checksum: as for ReceiveChannel.
    """

    def __init__(
        self,
        core: _core.ChannelReceiver,
        wait_policy: _core.WaitPolicy,
        source_stage: int,
        kind: Kind,
        checksum: bool = False,
    ) -> None:
        super().__init__(source_stage, kind, checksum)
        self._core = core
        self._wait_policy = wait_policy

    @property
    def counters(self) -> dict[str, int]:
        return self._core.counters

    def description(self, layout: int) -> str:
        return self._core.description(layout, self._wait_policy)

    def lies_in(self, message: Any, tensor: Tensor) -> bool:
        holds: bool = message.holds(tensor.data_ptr())
        return holds
