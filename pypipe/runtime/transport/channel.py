"""Channels: a tree of tensors goes in at one stage and comes out at the next.

A channel remembers the layouts that it has met. A tree of a known layout costs one hash; a new layout is announced to
the other end before the first message that has it. What all links share is here; each link's own classes add how bytes
move (`links/`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from pypipe import _core
from pypipe.errors import LayoutError, MismatchError
from pypipe.program import Kind
from pypipe.runtime.autograd.engine import enter
from pypipe.runtime.diagnostics.checks import checksums, compare_checksums
from pypipe.runtime.tensor_memory import copy_of, placeholder
from pypipe.runtime.transport import trees
from pypipe.runtime.transport.distributed_tensors import Meshes
from pypipe.runtime.transport.gradients import CopiedGradients, Gradients
from pypipe.runtime.transport.inputs import Inputs, WatchedInputs
from pypipe.runtime.transport.lease import CopiesLease, Lease, SlotLease

__all__ = ["IncomingLayout", "Message", "ReceiveChannel", "SendChannel", "Tag"]

# Layouts that one channel keeps at both ends; the oldest is forgotten first.
_MOST_LAYOUTS = 256


class Tag(NamedTuple):
    """What travels with a message, and is checked or used by the receiver."""

    stage: int  # the sender's
    kind: int  # the channel's Kind, by its order
    microbatch: int
    rows: int  # of this microbatch; 0 where the batch has none
    batch_rows: int
    run: int = 0  # 2 M, and 1 more in eval(): ranks must agree on both


class Message(Protocol):
    """A message that lies in a slot."""

    @property
    def layout(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def batch_rows(self) -> int: ...
    @property
    def size(self) -> int: ...


class _Outgoing(NamedTuple):
    handle: Any
    strides: tuple[tuple[int, ...] | None, ...]


class SendChannel(ABC):
    """The sending end of one stage boundary in one direction.

    Args:
        stage: which one sends.
        kind: the channel's: F, B, or W for weights.
        checksum: whether one more tensor travels, with a checksum of each of the others.
    """

    def __init__(self, stage: int, kind: Kind, checksum: bool = False) -> None:
        self._checksum = checksum
        self._stage = stage
        self._kind = kind.order
        self._run = 0
        self._layouts: dict[trees.Description, _Outgoing] = {}
        self.static = False
        """Whether messages are promised to have the layouts of the first step or eval."""
        self._promised: dict[tuple[int, int], tuple[trees.Description, int, int]] = {}

    @abstractmethod
    def announce(self, description: str, sizes: list[int], forgotten: int) -> Any:
        """Tells the other end of a layout.

        Args:
            description: as trees.encode() makes it.
            sizes: of its tensors, in bytes.
            forgotten: the `id` of a layout that will not be used again; 0: none.

        Returns:
            A handle, which has an `id`.
        """

    @abstractmethod
    def transfer(self, layout: Any, tag: Tag, tensors: Sequence[Tensor]) -> None:
        """Sends dense tensors of an announced layout. On a CPU they may be overwritten once the call returns."""

    @property
    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Messages, bytes, layouts, allocations, slots, slot_bytes so far."""

    def has_room(self) -> bool:
        """Whether a message would find a slot free, as far as the link can tell: never waits."""
        return False

    def issued(self) -> None:
        """Lets the current stream wait for what was sent, where it has to.

        Called where something else must be issued after a message before the stream may wait for it, such as the
        receive of what the other end sends at the same time.
        """

    def finish(self) -> None:
        """Ends a step.

        What the current stream gets from now on may overwrite all that was sent, such as an input that a stage has
        passed on unchanged.
        """

    def begin(self, run: int) -> None:
        """Begins a step.

        Args:
            run: 2 M, and 1 more in eval(). Messages carry it, so that ranks notice if they do not agree.
        """
        self._run = run

    def send(self, tree: Any, microbatch: int, rows: int, batch_rows: int, lease: Lease | None = None) -> list[Tensor]:
        """Sends a tree and returns its tensors in the order in which the other end counts them.

        Args:
            tree: of tensors, numbers, strings and None.
            microbatch: which one it is of.
            rows, batch_rows: the microbatch's and the batch's share of the data, in rows.
            lease: whose memory tensors of the tree may lie in; they are sent before it is given back.

        Raises:
            LayoutError: the tree holds something that cannot be sent.
        """
        tensors: list[Tensor] = []
        description = trees.describe(tree, tensors)
        if self.static:
            self._keep_promise(description, microbatch, rows, batch_rows)
        if len(tensors) == 1 and not self._checksum:  # the common case, without bookkeeping
            layout = self._layouts.get(description) or self._announce(description)
            only = trees.as_sent(tensors[0], layout.strides[0])
            self.transfer(layout.handle, Tag(self._stage, self._kind, microbatch, rows, batch_rows, self._run), (only,))
            return tensors
        sums: Tensor | None = None
        if self._checksum:
            sums = torch.zeros(len(tensors), dtype=torch.int64)
            description = ("tuple", (description, trees.describe(sums, tensors)))
        layout = self._layouts.get(description) or self._announce(description)
        sent = [trees.as_sent(tensor, strides) for tensor, strides in zip(tensors, layout.strides, strict=True)]
        if sums is not None:
            sums.copy_(torch.tensor(checksums(sent[:-1]), dtype=torch.int64))
        self.transfer(layout.handle, Tag(self._stage, self._kind, microbatch, rows, batch_rows, self._run), sent)
        return tensors if sums is None else tensors[:-1]

    def _keep_promise(self, description: trees.Description, microbatch: int, rows: int, batch_rows: int) -> None:
        new = (description, rows, batch_rows)
        promised = self._promised.setdefault((self._run, microbatch), new)
        if new == promised:
            return
        what = "output" if self._kind == Kind.F.order else "gradient"
        name = "eval()" if self._run % 2 else "step()"
        then, now = (f"{rows} of {whole} rows, {trees.outline(of)}" for of, rows, whole in (promised, new))
        raise LayoutError(
            f'the schedule has shapes="static", which promises that the {what} of a microbatch is in every {name} what '
            f'it was in the first: it was {then}, and is {now} now. Give the schedule shapes="dynamic", or pad batches '
            "to one size"
        )

    def _announce(self, description: trees.Description) -> _Outgoing:
        forgotten = 0
        if len(self._layouts) >= _MOST_LAYOUTS:
            forgotten = self._layouts.pop(next(iter(self._layouts))).handle.id
        specs = trees.tensor_specs(description)
        handle = self.announce(trees.encode(description), [spec.bytes for spec in specs], forgotten)
        layout = self._layouts[description] = _Outgoing(handle, tuple(spec.strides for spec in specs))
        return layout


class IncomingLayout:
    """A layout as its receiver uses it."""

    __slots__ = ("description", "entered", "has_leaves", "is_tensor", "offsets", "shared", "specs")

    def __init__(
        self, description: trees.Description, specs: tuple[trees.TensorSpec, ...], offsets: tuple[int, ...]
    ) -> None:
        self.description = description
        self.specs = specs
        self.offsets = offsets
        self.is_tensor: bool = description[0] == "T"  # with no container around it
        self.has_leaves = any(spec.requires_grad for spec in specs)
        self.entered = tuple(spec.requires_grad and spec.strides is not None for spec in specs)
        self.shared = trees.shared_tensors(description)

    def enter(self, tensors: list[Tensor]) -> list[Tensor]:
        """Makes leaves of the tensors that required gradients at the sender, and has `tensors` begin a graph there.

        Returns:
            The leaves, in the layout's order.
        """
        leaves = []
        for position, spec in enumerate(self.specs):
            if spec.requires_grad:
                leaf = tensors[position].requires_grad_()
                leaves.append(leaf)
                tensors[position] = enter(leaf)
                if spec.strides is None:  # contiguous
                    leaf.data = placeholder(Tensor, spec.dtype, leaf.device, leaf.shape)
        return leaves


class ReceiveChannel(ABC):
    """The receiving end of one stage boundary in one direction.

    Args:
        source_stage: which one sends.
        kind: the channel's: F, B, or W for weights.
        checksum: whether messages carry checksums.
    """

    posts: ClassVar[bool] = False
    """Whether post() does anything. Where it does not, a slot's release is all that its sender waits for."""

    def __init__(self, source_stage: int, kind: Kind, checksum: bool = False) -> None:
        self._checksum = checksum
        self._source_stage = source_stage
        self._kind_name = kind.label
        self._kind = kind.order
        self._run = 0
        self._layouts: dict[int, IncomingLayout] = {}
        self.static = False
        """Whether messages are promised to have the layouts of the first step or eval."""
        self.meshes: Meshes | None = None
        """The receiving stage's."""
        self._early: dict[int, Any] = {}

    @abstractmethod
    def wait(self, tag: Tag) -> Any:
        """Waits for the next message, which must carry this tag's stage, kind and microbatch; returns a `Message`."""

    @abstractmethod
    def description(self, layout: int) -> str:
        """The description that was announced for a layout, by its `id`."""

    @abstractmethod
    def tensor(self, message: Any, spec: trees.TensorSpec, offset: int) -> Tensor:
        """A new tensor on the slot's memory, with a version counter of its own."""

    @abstractmethod
    def lies_in(self, message: Any, tensor: Tensor) -> bool:
        """Whether the tensor's memory lies in the message's slot."""

    def is_ahead(self, message: Any) -> bool:
        """Whether the tensors of the next message in this slot have been made already."""
        return False

    @abstractmethod
    def release(self, message: Any) -> None:
        """Gives the slot back to the sender."""

    @property
    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Messages, bytes, layouts, allocations, slots, slot_bytes, alive, most_alive so far."""

    def gradients(self, *, splits: bool) -> Gradients:
        """What takes the gradients that come through this channel.

        Args:
            splits: whether the stage's backwards are split.
        """
        return CopiedGradients(self)

    def begin(self, run: int) -> None:
        """Begins a step; its messages must be of this run (see SendChannel)."""
        self._run = run

    def post(self, microbatch: int) -> None:
        """RECV: lets one more receive start, into a free slot."""

    def take(self, microbatch: int) -> None:
        """Waits for a message before it is used: its link carries it ahead of one that is used first."""
        self._early[microbatch] = self.wait(Tag(self._source_stage, self._kind, microbatch, 0, 0, self._run))

    def inputs(self) -> Inputs:
        """What takes the inputs that come through this channel."""
        return WatchedInputs(self, tells=False)

    def receive(self, microbatch: int, *, training: bool, copies: bool = False) -> Lease:
        """Waits for the message of this microbatch.

        Args:
            microbatch: which one must come next, unless it was taken already.
            training: whether tensors that require gradients at the sender get leaves here.
            copies: whether its tensors get memory of their own.
        """
        message = self._early.pop(microbatch, None) if self._early else None
        if message is None:
            message = self.wait(Tag(self._source_stage, self._kind, microbatch, 0, 0, self._run))
        layout = self._layouts.get(message.layout)
        if layout is None:
            layout = self._learn(message)
        leaves: list[Tensor]
        if copies:
            tensors = [copy_of(tensor) for tensor in self._on_slot(message, layout)]
            leaves, beside = layout.enter(tensors) if training and layout.has_leaves else [], None
        else:
            tensors, leaves, beside = self._open(message, layout, training=training)
        if layout.is_tensor:
            tree = tensors[0]
        else:
            if self._checksum:
                action = f"{self._source_stage}SEND_{self._kind_name}{microbatch}"
                compare_checksums(tensors[:-1], tensors[-1].tolist(), action)
            tree = trees.rebuild(layout.description, tensors, self.meshes)
            tree = tree[0] if self._checksum else tree
        entered = layout.entered if leaves else None
        lease: Lease
        if copies:
            rows, batch_rows = message.rows, message.batch_rows
            self.release(message)
            lease = CopiesLease(tree, tensors, leaves, entered, rows, batch_rows)
        else:
            lease = SlotLease(self, message, tree, tensors, leaves, entered, beside)
        if layout.shared:
            lease.note_shared(tensors, layout.shared)
        return lease

    def _open(
        self, message: Any, layout: IncomingLayout, *, training: bool
    ) -> tuple[list[Tensor], list[Tensor], object | None]:
        """A message's tensors, its leaves, and what keeps one more tensor on each of their storages."""
        tensors = self._on_slot(message, layout)
        return tensors, layout.enter(tensors) if training and layout.has_leaves else [], None

    def _on_slot(self, message: Any, layout: IncomingLayout) -> list[Tensor]:
        tensor = self.tensor
        return [tensor(message, spec, offset) for spec, offset in zip(layout.specs, layout.offsets, strict=True)]

    def _learn(self, message: Any) -> IncomingLayout:
        number = message.layout
        description = trees.decode(self.description(number))
        specs = tuple(trees.tensor_specs(description))
        *offsets, size = _core.pack([min(spec.bytes, 1 << 62) for spec in specs])
        if size != message.size:
            raise MismatchError(f"a peer sent {message.size} bytes of a layout that takes {size}")
        if len(self._layouts) >= 2 * _MOST_LAYOUTS:
            self._layouts.pop(next(iter(self._layouts)))
        layout = self._layouts[number] = IncomingLayout(description, specs, tuple(offsets))
        return layout
