"""The c10d link: messages over the process group's own backend, for ranks that shared memory cannot reach.

The tag of each message and its layout travel over the control socket, the bytes through isend and irecv of
torch.distributed. So the receiver knows the size before it receives, and any backend will do.

A Work of c10d can be waited for but not interrupted, so another thread waits for it, while the waiting rank watches
the control socket, its deadline and Ctrl-C. When the pipeline fails, that thread is left to itself: it ends with its
Work, or with the script (works.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pypipe import _core
from pypipe.errors import LayoutError, PipelineError, PipelineTimeout
from pypipe.program import Kind, Link
from pypipe.runtime.transport.channel import ReceiveChannel, SendChannel, Tag
from pypipe.runtime.transport.inputs import Inputs
from pypipe.runtime.transport.kept_tensors import has_shared_storage
from pypipe.runtime.transport.links.transport import Ends, Place, Transport
from pypipe.runtime.transport.links.works import Waiter, close_at_exit
from pypipe.runtime.transport.trees import TensorSpec

__all__ = ["C10dReceiveChannel", "C10dSendChannel", "C10dTransport", "Route"]

_SLICE_SECONDS = 0.05
_HUB_SECONDS = 0.5  # for the hub to learn of what the backend has met


@dataclass(frozen=True)
class Route:
    """Where one channel's messages go.

    Attributes:
        hub: the control sockets.
        group: the process group.
        peer: the other rank, in the group.
        channel: the channel's number, the same at both ends.
        tag: distinguishes this channel's messages from all others between the two ranks.
        slots: messages that may be under way or in use at once.
        device: where tensors live.
        buffers: where messages lie as the backend sends and receives them; the same kind of device at both ends, since
            it decides which of the group's backends carries them.
        wait_policy: how long to wait.
    """

    hub: _core.Hub
    group: Any
    peer: int
    channel: int
    tag: int
    slots: int
    device: torch.device
    buffers: torch.device
    wait_policy: _core.WaitPolicy

    @property
    def global_peer(self) -> int:
        """The other rank, in the world."""
        return dist.get_global_rank(self.group, self.peer)


class _Completion:
    """A transfer that is under way.

    Args:
        route: of a transfer that no rank may be waiting for: its failure fails the pipeline.
    """

    def __init__(self, route: Route | None = None) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self.route = route

    def end(self) -> None:
        """Lets those that wait go on."""
        self.done.set()

    def fail(self, error: Exception) -> None:
        """Notes the error."""
        self.error = error
        route = self.route
        if route is not None:
            hub = route.hub
            with contextlib.suppress(_core.CoreError):
                _let_hub_speak(route)
                text = f"sending to rank {route.peer} through torch.distributed failed: {error}"
                hub.abort(_core.Cause(_core.CauseKind.LINK, hub.rank, message=text))

    def wait(self, route: Route, what: str) -> None:
        """Waits, and raises what the hub knows rather than what the backend says where both fail."""
        deadline = time.monotonic() + route.wait_policy.timeout
        while not self.done.wait(_SLICE_SECONDS):
            try:
                route.hub.check(route.peer)
            except _core.CoreError as error:
                if error.fault != "peer_gone":
                    raise
                # It left in good order, so its bytes are under way.
            if time.monotonic() >= deadline:
                if route.wait_policy.prolong():
                    deadline = time.monotonic() + route.wait_policy.timeout
                    continue
                raise PipelineTimeout(f"{what} rank {route.peer} did not end in {route.wait_policy.timeout:g} s")
        if self.error is not None:
            _let_hub_speak(route)
            raise PipelineError(
                f"{what} rank {route.peer} through torch.distributed failed: {self.error}"
            ) from self.error


def _let_hub_speak(route: Route) -> None:
    """After an error of the backend: raises what the hub knows, or comes to know in a moment.

    A peer's death closes the backend's sockets and the hub's in any order, and "connection reset" says less.
    """
    deadline = time.monotonic() + _HUB_SECONDS
    while True:
        route.hub.check(route.peer)
        if time.monotonic() >= deadline:
            return
        time.sleep(0.005)


@contextlib.contextmanager
def _as_pipeline_error(what: str, route: Route) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        _let_hub_speak(route)
        raise PipelineError(f"{what} rank {route.peer} through torch.distributed failed: {error}") from error


class _Layout(NamedTuple):
    id: int
    offsets: tuple[int, ...]
    bytes: int


class _Pending(NamedTuple):
    completion: _Completion
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
            pending.completion.route = None  # a thread that is left behind keeps nothing of the pipeline's
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
            tag.stage, tag.kind, tag.microbatch, layout.id, tag.evaluates, layout.bytes, tag.rows, tag.batch_rows
        )
        route.hub.send_envelope(route.peer, envelope, route.channel, route.wait_policy)
        if layout.bytes:
            with _as_pipeline_error("sending to", route):
                work = dist.isend(buffer[: layout.bytes], route.global_peer, route.group, route.tag)
            completion = _Completion(route)
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
        """Receives what was sent and will not be used: the sender's Work ends with its receive only, if it lives."""
        route = self._route
        at_once = _core.WaitPolicy(0.0)
        with contextlib.suppress(Exception):
            while True:  # until there is none
                size = route.hub.take_envelope(route.peer, route.channel, at_once).bytes
                if size:
                    buffer = torch.empty(size, dtype=torch.uint8, device=route.device)
                    work = dist.irecv(buffer, route.global_peer, route.group, route.tag)
                    self._waiter.submit(work, _Completion())

    @property
    def counters(self) -> dict[str, int]:
        """What has been counted."""
        layouts = self._book.received
        return {**self._counters, "slots": self._route.slots, "slot_bytes": self._slot_bytes, "layouts": layouts}

    def inputs(self) -> Inputs:
        """What takes the inputs that come through this channel: they may be kept, since release() sees that."""
        return Inputs(self)

    def wait(self, tag: Tag) -> _Slot:
        """Waits for the message of this tag."""
        route = self._route
        envelope = route.hub.take_envelope(route.peer, route.channel, route.wait_policy)
        _core.check_tag(envelope, route.channel, tag.stage, tag.kind, tag.microbatch, tag.evaluates, route.peer)
        if envelope.bytes > self._slot_bytes:
            self._grow(envelope.bytes)
        slot = _Slot(envelope, self._free.pop())
        if envelope.bytes:
            with _as_pipeline_error("receiving from", route):
                work = dist.irecv(slot.buffer[: envelope.bytes], route.global_peer, route.group, route.tag)
            completion = _Completion()
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
