"""Ports over the core's NCCL links: tensors on GPUs, on the stream that is current when a call is made."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pypipe import _core
from pypipe.errors import LayoutError
from pypipe.runtime.transport.channels import Tag
from pypipe.runtime.transport.trees import TensorSpec

__all__ = ["Memory", "NcclReceivePort", "NcclSendPort", "current_stream"]


def current_stream(device: torch.device) -> int:
    """The handle of the compute stream: the device's current one; on a CPU the host itself, which is 0."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class Memory:
    """Device memory for a link, from torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def allocate(self, size: int) -> Tensor:
        """A block of so many bytes."""
        block = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._blocks[block.data_ptr()] = block
        return block

    def block(self, pointer: int) -> Tensor:
        """The block that starts there."""
        return self._blocks[pointer]


class NcclSendPort:
    """The sending end: keeps what it sends until the device has sent it."""

    def __init__(self, channel: _core.ChannelSender, device: torch.device, wait_policy: _core.WaitPolicy) -> None:
        self._channel = channel
        self._device = device
        self._wait_policy = wait_policy
        self._leaving: deque[tuple[int, Sequence[Tensor]]] = deque()
        self._on_gpu = device.type == "cuda"

    @property
    def counters(self) -> dict[str, int]:
        """What the core has counted."""
        return self._channel.counters

    def announce(self, description: str, sizes: list[int], forgotten: int) -> _core.OutgoingLayout:
        """Announces a layout."""
        return self._channel.announce(description, sizes, forgotten, self._wait_policy)

    def send(self, layout: _core.OutgoingLayout, tag: Tag, tensors: Sequence[Tensor]) -> None:
        """Enqueues the transfer, after what the current stream holds."""
        device = self._device
        for tensor in tensors:
            if tensor.is_cuda is not self._on_gpu:
                raise LayoutError(
                    f"this stage runs on {device}, but its output has a tensor on {tensor.device}: "
                    "give PipelineStage the device that the module really uses"
                )
        number = self._channel.send(
            layout,
            tag.stage,
            tag.kind,
            tag.microbatch,
            tag.evaluates,
            tag.rows,
            tag.batch_rows,
            [tensor.data_ptr() for tensor in tensors],
            current_stream(device),
            self._wait_policy,
        )
        # The allocator would hand freed memory to the compute stream, which does not wait for the link's.
        self._leaving.append((number, [tensor.detach() for tensor in tensors]))
        sent = self._channel.sent()
        while self._leaving and self._leaving[0][0] <= sent:
            self._leaving.popleft()

    def has_room(self) -> bool:
        """False: this link cannot tell."""
        return False

    def finish(self) -> None:
        """The current stream waits for what is still leaving."""
        self._channel.finish(current_stream(self._device))


class NcclReceivePort:
    """The receiving end."""

    posts = True
    storages_apart = False
    slots_stay = False

    def __init__(
        self, channel: _core.ChannelReceiver, memory: Memory, device: torch.device, wait_policy: _core.WaitPolicy
    ) -> None:
        self._channel = channel
        self._memory = memory
        self._device = device
        self._wait_policy = wait_policy

    @property
    def counters(self) -> dict[str, int]:
        """What the core has counted."""
        return self._channel.counters

    def post(self) -> None:
        """Starts the receives of what has been announced, as far as slots are free."""
        self._channel.post(current_stream(self._device), self._wait_policy)

    def receive(self, tag: Tag) -> _core.Message:
        """The next message: waits for its announcement only; the current stream waits for its bytes."""
        stream = current_stream(self._device)
        return self._channel.receive(tag.stage, tag.kind, tag.microbatch, tag.evaluates, stream, self._wait_policy)

    def description(self, layout: int) -> str:
        """The announced description."""
        return self._channel.description(layout, self._wait_policy)

    def tensor(self, message: Any, spec: TensorSpec, offset: int) -> Tensor:
        """A fresh tensor, with a version counter of its own, on the slot's memory."""
        tensor = torch.empty(0, dtype=spec.dtype, device=self._device)
        if spec.numel == 0:
            return tensor.new_empty(spec.shape)
        memory: int = message.memory
        start = (message.pointer - memory + offset) // spec.dtype.itemsize
        strides = spec.strides if spec.strides is not None else _contiguous(spec.shape)
        return tensor.set_(self._memory.block(memory).untyped_storage(), start, spec.shape, strides)

    def holds(self, message: Any, tensor: Tensor) -> bool:
        """Whether the tensor's memory lies in the slot."""
        offset: int = tensor.data_ptr() - message.pointer
        return bool(0 <= offset < message.bytes)

    def release(self, message: Any) -> None:
        """Gives the slot back, after what the current stream holds."""
        self._channel.release(message, current_stream(self._device))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
