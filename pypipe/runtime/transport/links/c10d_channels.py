"""The channels of the c10d link: what they pack, announce, and keep in buffers until the other end has it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pypipe import _core
from pypipe.errors import LayoutError
from pypipe.program import Kind
from pypipe.runtime.transport.channel import ReceiveChannel, SendChannel, Tag
from pypipe.runtime.transport.inputs import Inputs
from pypipe.runtime.transport.kept_tensors import has_shared_storage
from pypipe.runtime.transport.links.c10d_transfers import Completion, Route, as_pipeline_error
from pypipe.runtime.transport.links.works import Waiter, close_at_exit
from pypipe.runtime.transport.trees import TensorSpec

__all__ = ["C10dReceiveChannel", "C10dSendChannel"]


class _Layout(NamedTuple):
    id: int
    offsets: tuple[int, ...]
    bytes: int


class _Pending(NamedTuple):
    completion: Completion
    buffer: Tensor


class C10dSendChannel(SendChannel):
    """The sending end: packs a message into a buffer of its own and lets the backend take it from there."""

    def __init__(self, route: Route, stage: int, kind: Kind, checksum: bool = False) -> None:
        super().__init__(stage, kind, checksum)
        self._route = route
        self._announcer = _core.LayoutAnnouncer(route.hub, route.peer, route.channel)
        self._waiter = Waiter()
        self._closed = False
        close_at_exit(self)
        self._pending: deque[_Pending] = deque()
        self._counters = dict.fromkeys(("messages", "bytes", "layouts", "allocations", "slot_bytes"), 0)

    def close(self) -> None:
        """Waits for what is under way, unless the pipeline has failed, and ends the port's thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            while self._pending and self._route.hub.cause() is None:
                self._pending.popleft().completion.wait(self._route, "sending to")
        self._waiter.close(join=self._route.hub.cause() is None)
        for pending in self._pending:
            pending.completion.route = None  # so that a thread which is left behind keeps nothing of the pipeline alive
        self._pending.clear()

    @property
    def counters(self) -> dict[str, int]:
        """What has been counted."""
        return {**self._counters, "slots": self._route.slots}

    def announce(self, description: str, sizes: list[int], forgotten: int) -> _Layout:
        """Announces a layout."""
        offsets = _core.pack(sizes)
        number = self._announcer.announce(description, offsets[-1], forgotten, self._route.wait_policy)
        self._counters["layouts"] += 1
        return _Layout(number, tuple(offsets[:-1]), offsets[-1])

    def transfer(self, layout: _Layout, tag: Tag, tensors: Sequence[Tensor]) -> None:
        """Packs and sends; waits only while as many messages are under way as the receiver has slots."""
        route = self._route
        for tensor in tensors:
            if tensor.device.type != route.device.type:
                raise LayoutError(
                    f"this stage runs on {route.device}, but its output has a tensor on {tensor.device}: "
                    "give PipelineStage the device that the module really uses"
                )
        for pending in self._pending:
            if pending.completion.error is not None:
                pending.completion.wait(route, "sending to")
        buffer = self._buffer(layout.bytes)
        for tensor, offset in zip(tensors, layout.offsets, strict=True):
            if tensor.numel():
                # Its elements as they lie in memory, which has no gaps; as bytes, since torch cannot copy every dtype.
                memory = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                buffer[offset : offset + memory.numel()].copy_(memory)
        envelope = _core.Envelope(
            tag.stage, tag.kind, tag.microbatch, layout.id, tag.run, layout.bytes, tag.rows, tag.batch_rows
        )
        route.hub.send_envelope(route.peer, envelope, route.channel, route.wait_policy)
        if layout.bytes:
            with as_pipeline_error("sending to", route):
                work = dist.isend(buffer[: layout.bytes], route.global_peer, route.group, route.tag)
            completion = Completion(route)
            self._waiter.submit(work, completion)
            self._pending.append(_Pending(completion, buffer))
        self._counters["messages"] += 1
        self._counters["bytes"] += layout.bytes

    def _buffer(self, size: int) -> Tensor:
        """A buffer whose last message has left, or a new one while there are fewer than slots."""
        buffer: Tensor | None = None
        if self._pending and (len(self._pending) >= self._route.slots or self._pending[0].completion.done.is_set()):
            oldest = self._pending.popleft()
            oldest.completion.wait(self._route, "sending to")
            buffer = oldest.buffer
        if buffer is None or buffer.numel() < size:
            self._counters["allocations"] += 1
            self._counters["slot_bytes"] = max(size, self._counters["slot_bytes"])
            buffer = torch.empty(self._counters["slot_bytes"], dtype=torch.uint8, device=self._route.buffers)
        return buffer


class _Slot:
    """A message in a receive buffer."""

    __slots__ = ("buffer", "envelope")

    def __init__(self, envelope: _core.Envelope, buffer: Tensor) -> None:
        self.envelope = envelope
        self.buffer = buffer

    @property
    def layout(self) -> int:
        return int(self.envelope.layout)

    @property
    def rows(self) -> int:
        return int(self.envelope.rows)

    @property
    def batch_rows(self) -> int:
        return int(self.envelope.batch_rows)

    @property
    def size(self) -> int:
        return int(self.envelope.bytes)


class C10dReceiveChannel(ReceiveChannel):
    """The receiving end: as many buffers as the channel has slots, made when the first layout is known."""

    def __init__(self, route: Route, source_stage: int, kind: Kind, checksum: bool = False) -> None:
        super().__init__(source_stage, kind, checksum)
        self._route = route
        self._book = _core.LayoutBook(route.hub, route.peer, route.channel)
        self._waiter = Waiter()
        self._closed = False
        close_at_exit(self)
        self._free: list[Tensor] = []
        self._slot_bytes = -1
        self._counters = dict.fromkeys(("messages", "bytes", "allocations", "alive", "most_alive"), 0)

    def close(self) -> None:
        """Ends the port's thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        failed = self._route.hub.cause() is not None
        if failed:
            self._drain()
        self._waiter.close(join=not failed)

    def _drain(self) -> None:
        """Receives what was sent but will not be used: until then the Work of a sender that lives does not end."""
        route = self._route
        at_once = _core.WaitPolicy(0.0)
        with contextlib.suppress(Exception):
            while True:  # until there is none
                size = route.hub.take_envelope(route.peer, route.channel, at_once).bytes
                if size:
                    buffer = torch.empty(size, dtype=torch.uint8, device=route.device)
                    work = dist.irecv(buffer, route.global_peer, route.group, route.tag)
                    self._waiter.submit(work, Completion())

    @property
    def counters(self) -> dict[str, int]:
        """What has been counted."""
        layouts = self._book.received
        return {**self._counters, "slots": self._route.slots, "slot_bytes": self._slot_bytes, "layouts": layouts}

    def inputs(self) -> Inputs:
        """What takes the inputs that come through this channel: they may be kept, since release() notices."""
        return Inputs(self)

    def wait(self, tag: Tag) -> _Slot:
        """Waits for the message of this tag."""
        route = self._route
        envelope = route.hub.take_envelope(route.peer, route.channel, route.wait_policy)
        _core.check_tag(envelope, route.channel, tag.stage, tag.kind, tag.microbatch, tag.run, route.peer)
        if envelope.bytes > self._slot_bytes:
            self._grow(envelope.bytes)
        slot = _Slot(envelope, self._free.pop())
        if envelope.bytes:
            with as_pipeline_error("receiving from", route):
                work = dist.irecv(slot.buffer[: envelope.bytes], route.global_peer, route.group, route.tag)
            completion = Completion()
            self._waiter.submit(work, completion)
            completion.wait(route, "receiving from")
        counters = self._counters
        counters["messages"] += 1
        counters["bytes"] += envelope.bytes
        counters["alive"] += 1
        counters["most_alive"] = max(counters["most_alive"], counters["alive"])
        return slot

    def _grow(self, size: int) -> None:
        """Buffers of the new size; smaller ones that are in use are dropped when they come back."""
        self._slot_bytes = size
        missing = self._route.slots - self._counters["alive"]
        self._free = [torch.empty(size, dtype=torch.uint8, device=self._route.buffers) for _ in range(missing)]
        self._counters["allocations"] += 1

    def description(self, layout: int) -> str:
        """The announced description."""
        return self._book.description(layout, self._route.wait_policy)

    def tensor(self, message: _Slot, spec: TensorSpec, offset: int) -> Tensor:
        """A view of the slot, with a version counter of its own."""
        if spec.numel == 0:
            return torch.empty(spec.shape, dtype=spec.dtype, device=self._route.device)
        flat = message.buffer[offset : offset + spec.bytes].view(spec.dtype).data  # a version of its own
        if self._route.buffers.type != self._route.device.type:
            flat = flat.to(self._route.device)
        # Without an offset as_strided() keeps the tensor's own; one that is given counts from the storage's start.
        return flat.view(spec.shape) if spec.strides is None else flat.as_strided(spec.shape, spec.strides)

    def lies_in(self, message: _Slot, tensor: Tensor) -> bool:
        """Whether the tensor's memory lies in the slot."""
        return tensor.untyped_storage().data_ptr() == message.buffer.untyped_storage().data_ptr()

    def release(self, message: _Slot) -> None:
        """Keeps the buffer for a later message."""
        self._counters["alive"] -= 1
        buffer = message.buffer
        if buffer.numel() < self._slot_bytes or has_shared_storage(buffer):  # what a stage has kept is its own
            buffer = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._route.buffers)
        self._free.append(buffer)
