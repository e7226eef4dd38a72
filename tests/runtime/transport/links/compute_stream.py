"""Compute on a stream of its own, as on a GPU, in the eyes of the emulator's checker.

torch computes on the host, and what the host does is ordered by itself: a product that forgets an event would look
right. So here compute has a stream, which runs later than the host, and the checker is told of what compute does to
everything that the links touch. The host waits for the stream where torch is about to read what has been received;
the checker does not know of that wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor

from pypipe.runtime.transport.channel import Tag
from pypipe.runtime.transport.lease import Lease, SlotLease
from pypipe.runtime.transport.links import nccl

_POISON = b"\xfb"


@functools.cache
def _lease_type(size: int) -> Any:
    return type("Lease", (ctypes.Array,), {"_type_": ctypes.c_char, "_length_": size})


class ComputeStream:
    """The stream, and the channels that use it. One for each process: streams cost a thread."""

    def __init__(self, emulator: Any, cuda_library: str) -> None:
        self.emulator = emulator
        self._cuda = ctypes.CDLL(cuda_library)
        self.handle = self._new("compute")
        self.other = self._new("another stream")  # which compute does not use: for planted bugs
        self._pool: dict[int, list[bytearray]] = {}  # free memory by size; like torch's allocator, it gives none away
        self._blocks: dict[int, int] = {}  # where slots and staging buffers start and end

    def _new(self, name: str) -> int:
        stream = ctypes.c_void_p()
        assert self._cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
        assert stream.value is not None
        self.emulator.name_stream(stream.value, name)
        return stream.value

    def reads(self, data: int, size: int, name: str) -> None:
        """Compute that is enqueued now reads this."""
        if size:
            self.emulator.reads(data, size, name, self.handle)

    def writes(self, data: int, size: int, name: str) -> None:
        """Compute that is enqueued now writes this."""
        if size:
            self.emulator.writes(data, size, name, self.handle)

    def _lease(self, size: int) -> Tensor:
        whole = 1 << max(size - 1, 63).bit_length()
        free = self._pool.setdefault(whole, [])
        if free:
            # On a GPU its next use comes after what the stream waits for by then; here the host is about to write it.
            self.emulator.settle(self.handle)
            backing = free.pop()
            backing[:] = _POISON * whole
        else:
            backing = bytearray(whole)
        lease = _lease_type(size).from_buffer(backing)
        memory = torch.frombuffer(lease, dtype=torch.uint8)
        weakref.finalize(lease, self._recycle, memory.data_ptr(), size, backing).atexit = False
        return memory

    def _recycle(self, start: int, size: int, backing: bytearray) -> None:
        self._blocks.pop(start, None)
        self.emulator.recycled(start, size, self.handle)
        self._pool[len(backing)].append(backing)

    def allocate(self, size: int) -> Tensor:
        """Memory as torch's allocator gives it: earlier work of the compute stream may still use it."""
        block = self._lease(size)
        self._blocks[block.data_ptr()] = block.data_ptr() + size
        self.writes(block.data_ptr(), size, "earlier use of fresh memory")
        return block

    def is_lent(self, tensor: Tensor) -> bool:
        """Whether it lies in a link's memory."""
        pointer = tensor.data_ptr()
        return any(start <= pointer < end for start, end in self._blocks.items())

    def made(self, tensor: Tensor) -> Tensor:
        """The tensor's bytes as compute has just made them; freed, for all to see, with the last tensor on them."""
        size = tensor.numel() * tensor.element_size()
        if size == 0 or self.is_lent(tensor):
            return tensor
        copy = self._lease(size)
        copy.copy_(tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8))
        self.writes(copy.data_ptr(), size, "what made this tensor")
        return copy

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Pipelines that are connected meanwhile compute on the stream."""
        with contextlib.ExitStack() as stack:
            for where, name, value in (
                (nccl, "current_stream", lambda device: self.handle),
                (nccl.Memory, "allocate", lambda memory, size: _registered(memory, self.allocate(size))),
                (nccl, "NcclSendChannel", lambda *a: _SendChannel(self, *a)),
                (nccl, "NcclReceiveChannel", lambda *a: _ReceiveChannel(self, *a)),
            ):
                stack.enter_context(patch.object(where, name, value))
            yield


# As they are without a patch.
_NcclSendChannel: TypeAlias = nccl.NcclSendChannel
_NcclReceiveChannel: TypeAlias = nccl.NcclReceiveChannel


def _registered(memory: Any, block: Tensor) -> Tensor:
    memory._blocks[block.data_ptr()] = block
    return block


class _SendChannel(_NcclSendChannel):
    def __init__(self, compute: ComputeStream, *args: Any) -> None:
        super().__init__(*args)
        self._compute = compute

    def transfer(self, layout: Any, tag: Tag, tensors: Sequence[Tensor]) -> None:
        super().transfer(layout, tag, [self._compute.made(tensor) for tensor in tensors])

    def finish(self) -> None:
        leaving = list(self._leaving)
        super().finish()
        for _, tensors in leaving:
            for tensor in tensors:
                size = tensor.numel() * tensor.element_size()
                if not self._compute.is_lent(tensor):
                    self._compute.writes(tensor.data_ptr(), size, "the caller, after the step")


class _ReceiveChannel(_NcclReceiveChannel):
    def __init__(self, compute: ComputeStream, *args: Any) -> None:
        super().__init__(*args)
        self.compute = compute

    def wait(self, tag: Tag) -> Any:
        message = super().wait(tag)
        self.compute.emulator.settle(self.compute.handle)  # the host is about to do what compute would
        self.compute.reads(message.pointer, message.size, f"first use of {tag.microbatch}")
        return message

    def release(self, message: Any) -> None:
        self.compute.reads(message.pointer, message.size, "last use")
        super().release(message)

    def receive(self, microbatch: int, *, training: bool, copies: bool = False) -> Lease:
        """A backward reads what a forward saved of its input."""
        lease = super().receive(microbatch, training=training, copies=copies)
        if copies:  # memory that no link touches
            return lease
        assert isinstance(lease, SlotLease)
        entered = [tensor for tensor in lease._tensors if tensor.grad_fn is not None]
        for leaf, inside in zip(lease.leaves, entered, strict=True):
            data, size = inside.data_ptr(), math.prod(inside.shape) * inside.element_size()

            def used(_: Tensor, data: int = data, size: int = size) -> None:
                self.compute.reads(data, size, "backward")

            leaf.register_post_accumulate_grad_hook(used)
        return lease
