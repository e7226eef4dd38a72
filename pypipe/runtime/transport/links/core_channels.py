"""What channels over the core's own links have in common, whether they lie in shared memory or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pypipe import _core
from pypipe.runtime.transport.channel import ReceiveChannel, SendChannel, Tag

__all__ = ["CoreReceiveChannel", "CoreSendChannel"]


class CoreSendChannel(SendChannel):
    """The sending end of a channel of the core.

    Args:
        core: the core's end.
        patience: how long to wait.
        stage, kind, checksum: as for SendChannel.
    """

    def __init__(
        self, core: _core.SendChannel, patience: _core.Patience, stage: int, kind: int, checksum: bool = False
    ) -> None:
        super().__init__(stage, kind, checksum)
        self._core = core
        self._patience = patience

    @property
    def counters(self) -> dict[str, int]:
        return self._core.counters

    def announce(self, description: str, sizes: list[int], forgotten: int) -> _core.SendLayout:
        return self._core.announce(description, sizes, forgotten, self._patience)

    def _transfer(self, layout: _core.SendLayout, tag: Tag, tensors: Sequence[Tensor], stream: int) -> int:
        """Sends what the stream will have written into the tensors; returns the message's number."""
        return self._core.send(
            layout,
            tag.stage,
            tag.kind,
            tag.microbatch,
            tag.rows,
            tag.batch_rows,
            [tensor.data_ptr() for tensor in tensors],
            stream,
            self._patience,
        )


class CoreReceiveChannel(ReceiveChannel):
    """The receiving end of a channel of the core.

    Args:
        core: the core's end.
        patience: how long to wait.
        source_stage, kind, checksum: as for ReceiveChannel.
    """

    def __init__(
        self,
        core: _core.ReceiveChannel,
        patience: _core.Patience,
        source_stage: int,
        kind: int,
        checksum: bool = False,
    ) -> None:
        super().__init__(source_stage, kind, checksum)
        self._core = core
        self._patience = patience

    @property
    def counters(self) -> dict[str, int]:
        return self._core.counters

    def description(self, layout: int) -> str:
        return self._core.description(layout, self._patience)

    def lies_in(self, message: Any, tensor: Tensor) -> bool:
        holds: bool = message.holds(tensor.data_ptr())
        return holds
