"""The NCCL link: tensors on GPUs, on the stream that is current when a call is made."""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pypipe import _core
from pypipe.program import Kind, Link
from pypipe.runtime import libraries
from pypipe.runtime.rendezvous.exchange import read_all
from pypipe.runtime.transport.channel import Tag
from pypipe.runtime.transport.host_tensors import with_host_tensors
from pypipe.runtime.transport.lease import Lease
from pypipe.runtime.transport.links.communicators import plan_communicators
from pypipe.runtime.transport.links.core_channels import CoreReceiveChannel, CoreSendChannel
from pypipe.runtime.transport.links.transport import Ends, Place, Transport
from pypipe.runtime.transport.trees import TensorSpec

__all__ = [
    "Memory",
    "NcclReceiveChannel",
    "NcclSendChannel",
    "NcclTransport",
    "current_stream",
]


def _transfer_limit(timeout: float) -> float:
    """Seconds for a transfer over NCCL: a host that waits gives up first, at what it cannot do."""
    return timeout + max(5.0, 0.1 * timeout)


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


class NcclSendChannel(CoreSendChannel):
    """The sending end: keeps what it sends until the device has sent it, or until the compute stream waits for that.

    A stage may return one buffer again and again, as one made by torch.cuda.make_graphed_callables does. So in the
    first step, and in the first eval, the compute stream waits for each message before it goes on; if a message lies
    where another did that has not been let go of yet, it always does.

    Args:
        device: where the sending stage lives.
        core, wait_policy, stage, kind, checksum: as for CoreSendChannel.
    """

    def __init__(
        self,
        device: torch.device,
        core: _core.ChannelSender,
        wait_policy: _core.WaitPolicy,
        stage: int,
        kind: Kind,
        checksum: bool = False,
    ) -> None:
        super().__init__(core, wait_policy, stage, kind, checksum)
        self._device = device
        self._leaving: deque[tuple[int, Sequence[Tensor]]] = deque()
        self._slots = core.counters["slots"]
        self._seen: set[int] = set()  # runs: a stage may have one graph for each
        self._reuses = False
        self._due = self._has_sent = False
        self.held_back = False
        """Whether issued() is called when messages, and what goes out with them, have been issued."""

    def send(self, tree: Any, microbatch: int, rows: int, batch_rows: int, lease: Lease | None = None) -> list[Tensor]:
        if type(tree) is not Tensor or tree.device != self._device:
            tree = with_host_tensors(tree, self._device)
        return super().send(tree, microbatch, rows, batch_rows, lease)

    def transfer(self, layout: _core.OutgoingLayout, tag: Tag, tensors: Sequence[Tensor]) -> None:
        stream, first = current_stream(self._device), self._run not in self._seen
        if not self._reuses and self._lies_where_another_did(tensors):
            self._reuses = True
            if not first:
                warnings.warn(
                    f"stage {self._stage} returned memory that it had returned before, for the first time after its "
                    "first step: if it has written into it since (a CUDA graph does), what was being sent from there "
                    "is wrong in this step. It is waited for from now on; wrap the stage before its first step.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        number = self._transfer(layout, tag, tensors, stream)
        self._has_sent = True
        # The allocator would hand freed memory to the compute stream, which does not wait for the link's.
        self._leaving.append((number, [tensor.detach() for tensor in tensors]))
        if first or self._reuses:
            self._due = True
            if not self.held_back:
                self.issued()
        sent, kept = self._core.sent(), self._slots if first else 0
        while len(self._leaving) > kept and self._leaving[0][0] <= sent:
            self._leaving.popleft()

    def issued(self) -> None:
        if self._due:
            self._due = False
            self._core.finish(current_stream(self._device))

    def _lies_where_another_did(self, tensors: Sequence[Tensor]) -> bool:
        if not self._leaving:
            return False
        before = {tensor.data_ptr() for _, sent in self._leaving for tensor in sent if tensor.numel()}
        return any(tensor.data_ptr() in before for tensor in tensors if tensor.numel())

    def finish(self) -> None:
        self._core.finish(current_stream(self._device))  # that stream waits for what is still leaving
        self._end_run()

    def _end_run(self) -> None:
        self._leaving.clear()
        if self._has_sent:  # an eval sends no gradients
            self._has_sent = False
            self._seen.add(self._run)


class NcclReceiveChannel(CoreReceiveChannel):
    """The receiving end.

    Args:
        memory: what the slots were allocated from.
        device: where the receiving stage lives.
        core, wait_policy, source_stage, kind, checksum: as for CoreReceiveChannel.
    """

    posts = True

    def __init__(
        self,
        memory: Memory,
        device: torch.device,
        core: _core.ChannelReceiver,
        wait_policy: _core.WaitPolicy,
        source_stage: int,
        kind: Kind,
        checksum: bool = False,
    ) -> None:
        super().__init__(core, wait_policy, source_stage, kind, checksum)
        self._slots = memory
        self._device = device

    def begin(self, run: int) -> None:
        super().begin(run)
        if self.static:
            self._core.begin(run)

    def post(self, microbatch: int) -> None:
        """Starts to receive the next message, for whose announcement it waits unless its layout is promised."""
        self._core.post(current_stream(self._device), self._wait_policy)

    def wait(self, tag: Tag) -> _core.Message:
        """The next message, whose receive was posted; the current stream waits for its bytes."""
        stream = current_stream(self._device)
        return self._core.receive(tag.stage, tag.kind, tag.microbatch, tag.run, stream, self._wait_policy)

    def tensor(self, message: Any, spec: TensorSpec, offset: int) -> Tensor:
        tensor = torch.empty(0, dtype=spec.dtype, device=self._device)
        if spec.numel == 0:
            return tensor.new_empty(spec.shape)
        memory: int = message.memory
        start = (message.pointer - memory + offset) // spec.dtype.itemsize
        strides = spec.strides if spec.strides is not None else _contiguous(spec.shape)
        return tensor.set_(self._slots.block(memory).untyped_storage(), start, spec.shape, strides)

    def release(self, message: Any) -> None:
        self._core.release(message, current_stream(self._device))  # after what that stream holds


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class NcclTransport(Transport):
    """NCCL between GPUs."""

    name = "nccl"
    through_hosts = False
    synchronous = True
    closes_last = (
        True  # its end begins with a goodbye to all neighbours, and what others carry must be with them by then
    )

    _CLOSING_SECONDS = 10.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        device = self._device
        self._prefix = self._rendezvous.prefix
        self._memory = Memory(device)
        self._links: dict[Link, Any] = {}
        self._communicators = plan_communicators(self._all_links, self._rendezvous.configs)
        self.holds_back = self._communicators.by_pair
        self._group = _core.NcclGroup() if self.holds_back else None
        self._nccl = libraries.nccl()
        self._edges = _core.NcclEdges(libraries.gpu(device.index or 0), self._nccl)
        self._edge_of: dict[Any, _core.NcclEdge] = {}
        self._senders: list[NcclSendChannel] = []
        self._watchdog: _core.NcclWatchdog | None = None
        for problem in (libraries.one_queue(), self._communicators.reason):
            if problem is not None:
                warnings.warn(problem, RuntimeWarning, stacklevel=2)

    @classmethod
    def reaches(cls, ends: Ends) -> bool:
        return all(config.device == "cuda" for config in ends)

    @classmethod
    def problem(cls, link: Link, ends: Ends, *, chosen: bool) -> str | None:
        return None  # libraries that are missing are said when they are opened

    def open(self, number: int, link: Link, slots: dict[int, int], *, sends: bool) -> None:
        edge = self._edge(number, link)
        args = (self._hub, link.target_rank if sends else link.source_rank, number, edge, self._memory.allocate)
        if sends:
            self._links[link] = _core.NcclSendLink(*args, self._group)
        else:
            self._links[link] = _core.NcclReceiveLink(*args, list(slots.items()), self._group)

    def _edge(self, number: int, link: Link) -> _core.NcclEdge:
        """The link's own communicator; with a group, the one of its two ranks, made for the first of their links."""
        ends = [link.source_rank, link.target_rank]
        key: Any = link
        name = f"pypipe {'F' if link.kind is Kind.F else 'B'} {ends[0]}>{ends[1]}"
        if self._group is not None:
            ends.sort()
            key = tuple(ends)
            name = f"pypipe {ends[0]}-{ends[1]}"
        if key in self._edge_of:
            return self._edge_of[key]
        where = f"{self._prefix}/nccl/{number}"
        rank = ends.index(self._world.rank)
        if rank == 0:
            self._world.publish(where, self._nccl.unique_id().hex())
        deadline = time.monotonic() + self._wait_policy.timeout
        unique_id = bytes.fromhex(read_all(self._world, self._prefix, {ends[0]: where}, deadline)[ends[0]])
        direction = _core.NcclDirection.ONE_WAY if self._group is None else _core.NcclDirection.BOTH_WAYS
        ctas = self._communicators.ctas[min(ends), max(ends)]
        edge = self._edge_of[key] = self._edges.add(unique_id, rank, direction, name, ctas)
        return edge

    def connect(self) -> None:
        self._edges.connect(self._wait_policy)
        self._watchdog = _core.NcclWatchdog(
            self._hub, self._edges, _transfer_limit(self._wait_policy.timeout), self._world.size
        )

    def issue(self) -> None:
        if self._group is not None:
            self._group.issue(self._wait_policy)
            for sender in self._senders:
                sender.issued()

    def send_channel(self, place: Place) -> NcclSendChannel:
        core = _core.ChannelSender(
            self._hub, self._links[place.link], place.link.target_rank, place.number, place.slots
        )
        sender = NcclSendChannel(self._device, core, self._wait_policy, *place.sent)
        sender.held_back = self.holds_back or place.channel.kind is Kind.W  # two copies' gradients cross
        self._senders.append(sender)
        return sender

    def receive_channel(self, place: Place) -> NcclReceiveChannel:
        source = place.link.source_rank
        core = _core.ChannelReceiver(self._hub, self._links[place.link], source, place.number, place.slots)
        return NcclReceiveChannel(self._memory, self._device, core, self._wait_policy, *place.sent)

    def close(self) -> None:
        if self._watchdog is not None:
            with contextlib.suppress(Exception):
                self._watchdog.close(_core.WaitPolicy(self._CLOSING_SECONDS))
        self._links, self._edge_of, self._senders, self._group = {}, {}, [], None
