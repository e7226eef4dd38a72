"""The NCCL link: tensors on GPUs, on the stream that is current when a call is made."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pypipe import _core
from pypipe.errors import ConfigurationError, LayoutError
from pypipe.program import Kind, Link
from pypipe.runtime import environment, libraries
from pypipe.runtime.rendezvous.exchange import read_all
from pypipe.runtime.transport.channel import Tag
from pypipe.runtime.transport.links.core_channels import CoreReceiveChannel, CoreSendChannel
from pypipe.runtime.transport.links.transport import Ends, Place, Transport
from pypipe.runtime.transport.trees import TensorSpec

__all__ = [
    "Memory",
    "NcclReceiveChannel",
    "NcclSendChannel",
    "NcclTransport",
    "current_stream",
    "max_ctas",
    "single_communicator",
]

# NCCL's and the driver's first releases in which the host's order of calls is the order of the communicators; an older
# driver has them run one after another, in which case a receive that is posted early stops everything behind it.
_ORDERED_NCCL, _ORDERED_DRIVER = 22600, 12030


def single_communicator(device: torch.device, choice_of_link: str) -> bool:
    """Whether two ranks have one NCCL communicator for all their links, as their programs then have to know.

    Args:
        device: where the stages of this rank live.
        choice_of_link: what PYPIPE_LINK says.

    Raises:
        ConfigurationError: PYPIPE_NCCL_COMMUNICATORS is not one of its choices.
    """
    choice = environment.read("PYPIPE_NCCL_COMMUNICATORS", ("auto", "link", "pair"))
    if device.type != "cuda" and choice_of_link != "nccl":
        return False
    if choice != "auto":
        return choice == "pair"
    try:
        return libraries.nccl().version < _ORDERED_NCCL or libraries.cuda().version < _ORDERED_DRIVER
    except ConfigurationError:
        return False  # said when the ranks connect, if a link is NCCL's at all


def max_ctas() -> int:
    """The most thread blocks of a communicator.

    Raises:
        ConfigurationError: PYPIPE_NCCL_MAX_CTAS is not such a number.
    """
    value = environment.read("PYPIPE_NCCL_MAX_CTAS")
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 64):  # NCCL's own limit
        raise ConfigurationError(f"PYPIPE_NCCL_MAX_CTAS={value!r}: it takes a whole number, 1 to 64")
    return int(value)


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
    """The sending end: keeps what it sends until the device has sent it.

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
        self._on_gpu = device.type == "cuda"

    def transfer(self, layout: _core.OutgoingLayout, tag: Tag, tensors: Sequence[Tensor]) -> None:
        device = self._device
        for tensor in tensors:
            if tensor.is_cuda is not self._on_gpu:
                raise LayoutError(
                    f"this stage runs on {device}, but its output has a tensor on {tensor.device}: "
                    "give PipelineStage the device that the module really uses"
                )
        number = self._transfer(layout, tag, tensors, current_stream(device))
        # The allocator would hand freed memory to the compute stream, which does not wait for the link's.
        self._leaving.append((number, [tensor.detach() for tensor in tensors]))
        sent = self._core.sent()
        while self._leaving and self._leaving[0][0] <= sent:
            self._leaving.popleft()

    def finish(self) -> None:
        self._core.finish(current_stream(self._device))  # that stream waits for what is still leaving


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

    def post(self, microbatch: int) -> None:
        """Starts the receives of what has been announced, as far as slots are free."""
        self._core.post(current_stream(self._device), self._wait_policy)

    def wait(self, tag: Tag) -> _core.Message:
        """The next message: waits for its announcement only; the current stream waits for its bytes."""
        stream = current_stream(self._device)
        return self._core.receive(tag.stage, tag.kind, tag.microbatch, tag.evaluates, stream, self._wait_policy)

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
    closes_last = (
        True  # its end begins with a goodbye to all neighbours, and what others carry must be with them by then
    )

    _MIN_CTAS = 1
    _CLOSING_SECONDS = 10.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        device = self._device
        self._prefix = self._rendezvous.prefix
        self._memory = Memory(device)
        self._links: dict[Link, Any] = {}
        self._edges: dict[Any, _core.NcclEdge] = {}
        self.holds_back = single_communicator(device, environment.read("PYPIPE_LINK"))
        self._group = _core.NcclGroup() if self.holds_back else None
        self._watchdog: _core.NcclWatchdog | None = None
        self._cuda = libraries.cuda()
        self._nccl = libraries.nccl()
        if (problem := libraries.one_queue()) is not None:
            warnings.warn(problem, RuntimeWarning, stacklevel=2)
        # Before 2.26 NCCL knows no order among communicators; from then on the host's order counts, where this is set
        # (2.31 has it per communicator, which the core sets).
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.current_stream(device)  # makes the device's context current on this thread

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
        if key in self._edges:
            return self._edges[key]
        where = f"{self._prefix}/nccl/{number}"
        rank = ends.index(self._world.rank)
        if rank == 0:
            self._world.publish(where, self._nccl.unique_id().hex())
        deadline = time.monotonic() + self._wait_policy.timeout
        unique_id = bytes.fromhex(read_all(self._world, self._prefix, {ends[0]: where}, deadline)[ends[0]])
        edge = self._edges[key] = _core.NcclEdge(
            self._cuda,
            self._nccl,
            unique_id,
            rank,
            _core.NcclDirection.ONE_WAY if self._group is None else _core.NcclDirection.BOTH_WAYS,
            name,
            self._MIN_CTAS,
            max_ctas(),
            self._wait_policy,
        )
        return edge

    def issue(self) -> None:
        if self._group is not None:
            self._group.issue(self._wait_policy)

    def _watch(self) -> None:
        if self._watchdog is None:
            edges = list(self._edges.values())
            self._watchdog = _core.NcclWatchdog(
                self._hub, edges, _transfer_limit(self._wait_policy.timeout), self._world.size
            )

    def send_channel(self, place: Place) -> NcclSendChannel:
        self._watch()
        core = _core.ChannelSender(
            self._hub, self._links[place.link], place.link.target_rank, place.number, place.slots
        )
        return NcclSendChannel(self._device, core, self._wait_policy, *place.sent)

    def receive_channel(self, place: Place) -> NcclReceiveChannel:
        self._watch()
        source = place.link.source_rank
        core = _core.ChannelReceiver(self._hub, self._links[place.link], source, place.number, place.slots)
        return NcclReceiveChannel(self._memory, self._device, core, self._wait_policy, *place.sent)

    def close(self) -> None:
        if self._watchdog is not None:
            with contextlib.suppress(Exception):
                self._watchdog.close(_core.WaitPolicy(self._CLOSING_SECONDS))
        self._links, self._edges, self._group = {}, {}, None
