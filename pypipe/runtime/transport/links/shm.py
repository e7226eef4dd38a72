"""Ports over the core's channels: CPU tensors through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pypipe import _core
from pypipe.errors import LayoutError
from pypipe.runtime.transport.channels import Tag
from pypipe.runtime.transport.trees import TensorSpec

__all__ = ["CoreReceivePort", "CoreSendPort"]

_HOST = 0  # the stream of a CPU


class CoreSendPort:
    """The sending end of a channel of the core."""

    def __init__(self, channel: _core.ChannelSender, wait_policy: _core.WaitPolicy) -> None:
        self._channel = channel
        self._wait_policy = wait_policy
        self.has_room: Callable[[], bool] = channel.has_room
        """Whether a slot is free."""

    @property
    def counters(self) -> dict[str, int]:
        """What the core has counted."""
        return self._channel.counters

    def announce(self, description: str, sizes: list[int], forgotten: int) -> _core.OutgoingLayout:
        """Announces a layout; grows the slots where it needs more room."""
        return self._channel.announce(description, sizes, forgotten, self._wait_policy)

    def send(self, layout: _core.OutgoingLayout, tag: Tag, tensors: Sequence[Tensor]) -> None:
        """Copies the tensors into a free slot of the receiver."""
        for tensor in tensors:
            if not tensor.is_cpu:
                raise LayoutError(
                    f"this stage runs on the CPU, but its output has a tensor on {tensor.device}: "
                    "give PipelineStage the device that the module really uses"
                )
        self._channel.send(
            layout,
            tag.stage,
            tag.kind,
            tag.microbatch,
            tag.evaluates,
            tag.rows,
            tag.batch_rows,
            [tensor.data_ptr() for tensor in tensors],
            _HOST,
            self._wait_policy,
        )

    def finish(self) -> None:
        """Nothing: send() has read what it sent."""


class CoreReceivePort:
    """The receiving end of a channel of the core."""

    posts = False
    storages_apart = True
    slots_stay = True

    def post(self) -> None:
        """Nothing: the sender may go on as soon as a slot is free."""

    def __init__(self, channel: _core.ChannelReceiver, wait_policy: _core.WaitPolicy) -> None:
        self._channel = channel
        self._wait_policy = wait_policy

    @property
    def counters(self) -> dict[str, int]:
        """What the core has counted."""
        return self._channel.counters

    def receive(self, tag: Tag) -> _core.Message:
        """Waits for the message."""
        return self._channel.receive(tag.stage, tag.kind, tag.microbatch, tag.evaluates, _HOST, self._wait_policy)

    def description(self, layout: int) -> str:
        """The announced description."""
        return self._channel.description(layout, self._wait_policy)

    def tensor(self, message: Any, spec: TensorSpec, offset: int) -> Tensor:
        """A fresh tensor, with a version counter of its own, on the slot's memory."""
        if spec.numel == 0:
            return torch.empty(spec.shape, dtype=spec.dtype)
        flat = torch.frombuffer(message, dtype=spec.dtype, count=spec.numel, offset=offset)
        if spec.strides is not None:
            return flat.as_strided(spec.shape, spec.strides).detach()
        # In place, so it is no view to autograd (a stage may detach_() it), and one operation instead of two.
        return flat if len(spec.shape) == 1 else flat.resize_(spec.shape)

    def holds(self, message: Any, tensor: Tensor) -> bool:
        """Whether the tensor's memory lies in the slot."""
        holds: bool = message.holds(tensor.data_ptr())
        return holds

    def release(self, message: Any) -> None:
        """Returns the slot's credit to the sender."""
        self._channel.release(message, _HOST)
