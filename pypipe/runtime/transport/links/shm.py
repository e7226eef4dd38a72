"""The shared memory link: CPU tensors between processes of one host, through the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pypipe import _core
from pypipe.errors import LayoutError
from pypipe.program import Kind, Link
from pypipe.runtime.torch_private import are_modes_active
from pypipe.runtime.transport.channel import IncomingLayout, Tag
from pypipe.runtime.transport.gradients import Gradients, LentGradients
from pypipe.runtime.transport.inputs import Inputs, WatchedInputs
from pypipe.runtime.transport.links.core_channels import CoreReceiveChannel, CoreSendChannel
from pypipe.runtime.transport.links.transport import Ends, Place, Transport
from pypipe.runtime.transport.trees import TensorSpec

__all__ = ["ShmReceiveChannel", "ShmSendChannel", "ShmTransport"]

_HOST = 0  # the stream of a CPU


class ShmSendChannel(CoreSendChannel):
    """The sending end: one copy, into a free slot of the receiver."""

    def __init__(
        self, core: _core.ChannelSender, wait_policy: _core.WaitPolicy, stage: int, kind: Kind, checksum: bool = False
    ) -> None:
        super().__init__(core, wait_policy, stage, kind, checksum)
        self.has_room: Callable[[], bool] = core.has_room  # one call less a message

    def transfer(self, layout: _core.OutgoingLayout, tag: Tag, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if not tensor.is_cpu:
                raise LayoutError(
                    f"this stage runs on the CPU, but its output has a tensor on {tensor.device}: "
                    "give PipelineStage the device that the module really uses"
                )
        self._transfer(layout, tag, tensors, _HOST)


class ShmReceiveChannel(CoreReceiveChannel):
    """The receiving end.

    A message's tensors are views of its slot, and new objects. torch's operations take several times as long right
    after a stage has run, which has taken the caches. So a tensor on each slot is kept, of which a message's is the
    detached copy, in one operation; and what a leaf takes more is made while there is time, before the slot's next
    message is waited for.
    """

    def __init__(
        self,
        core: _core.ChannelReceiver,
        wait_policy: _core.WaitPolicy,
        source_stage: int,
        kind: Kind,
        checksum: bool = False,
    ) -> None:
        super().__init__(core, wait_policy, source_stage, kind, checksum)
        self._layout: IncomingLayout | None = None  # that tensors are kept and made ahead for
        self._last: Any = None  # message
        self._memory = 0  # that these slots lie in
        self._kept: dict[int, list[Tensor]] = {}  # by slot
        self._ahead: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # tensors and leaves, by slot
        self._keeps = False

    def begin(self, run: int) -> None:
        super().begin(run)
        # Only if tensors are now what they would be later: no mode changes them.
        training = run % 2 == 0
        self._keeps = (
            training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not are_modes_active()
        )

    def gradients(self, *, splits: bool) -> Gradients:
        return LentGradients(self, tries=splits)

    def inputs(self) -> Inputs:
        return WatchedInputs(self, tells=True)

    def wait(self, tag: Tag) -> _core.Message:
        last, layout = self._last, self._layout
        if last is not None and layout is not None and self._keeps:
            self._last = None
            tensors = self._copies_on_slot(last, layout)
            self._ahead[last.pointer] = tensors, layout.enter(tensors)
        return self._core.receive(tag.stage, tag.kind, tag.microbatch, tag.run, _HOST, self._wait_policy)

    def _open(
        self, message: Any, layout: IncomingLayout, *, training: bool
    ) -> tuple[list[Tensor], list[Tensor], object | None]:
        if not self._keeps:
            return super()._open(message, layout, training=training)
        if layout is not self._layout:
            self._layout = layout
            self._forget()
        if not (training and layout.has_leaves):
            return self._copies_on_slot(message, layout), [], self._kept
        self._last = message
        made = self._ahead.pop(message.pointer, None)
        if made is not None:
            return *made, self._kept
        tensors = self._copies_on_slot(message, layout)
        return tensors, layout.enter(tensors), self._kept

    def is_ahead(self, message: Any) -> bool:
        return message.pointer in self._ahead

    def _copies_on_slot(self, message: Any, layout: IncomingLayout) -> list[Tensor]:
        kept = self._kept.get(message.pointer)
        if kept is None:
            if message.memory != self._memory:  # the slots have grown: let go of the old ones
                self._memory = message.memory
                self._forget()
            kept = self._kept[message.pointer] = self._on_slot(message, layout)
        return [tensor.detach() for tensor in kept]

    def _forget(self) -> None:
        self._kept = {}  # a new one: messages that are still in use have the old one
        self._ahead = {}
        self._last = None

    def tensor(self, message: Any, spec: TensorSpec, offset: int) -> Tensor:
        if spec.numel == 0:
            return torch.empty(spec.shape, dtype=spec.dtype)
        flat = torch.frombuffer(message, dtype=spec.dtype, count=spec.numel, offset=offset)
        if spec.strides is not None:
            return flat.as_strided(spec.shape, spec.strides).detach()
        # In place, so it is no view to autograd (a stage may detach_() it), and one operation instead of two.
        return flat if len(spec.shape) == 1 else flat.resize_(spec.shape)

    def release(self, message: Any) -> None:
        self._core.release(message, _HOST)


class ShmTransport(Transport):
    """Shared memory between the CPU processes of one host."""

    name = "shm"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._links: dict[Link, Any] = {}

    @classmethod
    def reaches(cls, ends: Ends) -> bool:
        return ends[0].host == ends[1].host and all(config.device == "cpu" for config in ends)

    @classmethod
    def problem(cls, link: Link, ends: Ends, *, chosen: bool) -> str | None:
        if cls.reaches(ends):
            return None
        return (
            f"PYPIPE_LINK=shm, but shared memory does not reach from rank {link.source_rank} to rank "
            f"{link.target_rank}: they are on different hosts, or a stage is not on the CPU"
        )

    def open(self, number: int, link: Link, slots: dict[int, int], *, sends: bool) -> None:
        kind = _core.ShmSendLink if sends else _core.ShmReceiveLink
        peer = link.target_rank if sends else link.source_rank
        self._links[link] = kind(self._hub, peer, number, sum(slots.values()), self._wait_policy)

    def send_channel(self, place: Place) -> ShmSendChannel:
        core = _core.ChannelSender(
            self._hub, self._links[place.link], place.link.target_rank, place.number, place.slots
        )
        return ShmSendChannel(core, self._wait_policy, *place.sent)

    def receive_channel(self, place: Place) -> ShmReceiveChannel:
        core = _core.ChannelReceiver(
            self._hub, self._links[place.link], place.link.source_rank, place.number, place.slots
        )
        return ShmReceiveChannel(core, self._wait_policy, *place.sent)

    def close(self) -> None:
        self._links = {}  # the kernel frees the memory with its last mapping
