"""Channels as the executor sees them: trees go in at one stage and come out at the next.

A channel remembers the layouts it has met. A tree of a known layout costs one hash; a new one is announced to the
other end before the message that has it. The bytes move through a *port*: the core's channels (shared memory), or
the c10d link's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pypipe import _core
from pypipe.errors import MismatchError
from pypipe.program import Kind
from pypipe.runtime.diagnostics.checks import checksums, compare_checksums
from pypipe.runtime.tensor_memory import memory_parts
from pypipe.runtime.transport import trees
from pypipe.runtime.transport.arrivals import Arrivals, IncomingLayout
from pypipe.runtime.transport.distributed_tensors import Meshes

__all__ = ["ReceiveChannel", "ReceivePort", "Received", "SendChannel", "SendPort", "is_shared"]

# Layouts that one channel keeps at both ends; the oldest is forgotten first.
_MOST_LAYOUTS = 256


class Tag(NamedTuple):
    """What travels with a message, and is checked or used by the receiver."""

    stage: int  # the sender's
    kind: int  # the channel's Kind, by its order
    microbatch: int
    rows: int  # of this microbatch; 0 where the batch has none
    batch_rows: int
    evaluates: bool = False  # whether it is sent in eval(), which ranks must not mix with step()


class SendPort(Protocol):
    """The sending end of a channel over some link."""

    def announce(self, description: str, sizes: list[int], forgotten: int) -> Any:
        """Tells the other end of a layout; returns a handle with an `id`."""

    def send(self, layout: Any, tag: Tag, tensors: Sequence[Tensor]) -> None:
        """Sends dense tensors of that layout; they may be overwritten once the call (on a CPU) returns."""

    def has_room(self) -> bool:
        """Whether send() would find a slot free, as far as the link can tell. Never waits."""

    def finish(self) -> None:
        """Ends a step: what the current stream gets from now on may overwrite all that was sent."""

    @property
    def counters(self) -> dict[str, int]:
        """Messages, bytes, layouts, allocations, slots, slot_bytes so far."""


class Inbound(Protocol):
    """A message that has arrived in a slot."""

    @property
    def layout(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def batch_rows(self) -> int: ...
    @property
    def size(self) -> int: ...


class ReceivePort(Protocol):
    """The receiving end of a channel over some link."""

    @property
    def posts(self) -> bool:
        """Whether post() does anything."""

    @property
    def storages_apart(self) -> bool:
        """Whether each tensor has a storage of its own, so that its count tells who else uses the memory."""

    @property
    def slots_stay(self) -> bool:
        """Whether tensor() may be asked for a slot's next message too: its memory stays in its place."""

    def post(self) -> None:
        """Lets one more receive start."""

    def receive(self, tag: Tag) -> Inbound:
        """Waits for the next message, which must carry this tag's stage, kind and microbatch."""

    def description(self, layout: int) -> str:
        """The description that was announced for this layout."""

    def tensor(self, message: Any, spec: trees.TensorSpec, offset: int) -> Tensor:
        """A fresh tensor on the slot's memory."""

    def holds(self, message: Any, tensor: Tensor) -> bool:
        """Whether the tensor's memory lies in the message's slot."""

    def release(self, message: Any) -> None:
        """Gives the slot back."""

    @property
    def counters(self) -> dict[str, int]:
        """Messages, bytes, layouts, allocations, slots, slot_bytes, alive, most_alive so far."""


class _Outgoing(NamedTuple):
    handle: Any
    strides: tuple[tuple[int, ...] | None, ...]


class SendChannel:
    """The sending end of one stage boundary in one direction.

    Args:
        port: the link's end.
        stage: which one sends.
        kind: the channel's: F, B, or W for weights.
        checksum: whether one more tensor travels, with a checksum of each of the others.
    """

    def __init__(self, port: SendPort, stage: int, kind: Kind, checksum: bool = False) -> None:
        self._checksum = checksum
        self._port = self.port = port
        self.has_room: Callable[[], bool] = port.has_room
        """Whether a message would be sent without a wait, as far as its link can tell."""
        self._stage = stage
        self._kind = kind.order
        self._evaluates = False
        self._layouts: dict[trees.Description, _Outgoing] = {}

    @property
    def counters(self) -> dict[str, int]:
        """What the port has counted."""
        return self._port.counters

    def begin(self, *, training: bool) -> None:
        """Begins a step. Messages say whether it is one of step() or of eval(): ranks must not mix them."""
        self._evaluates = not training

    def send(self, tree: Any, microbatch: int, rows: int, batch_rows: int, lender: Any = None) -> list[Tensor]:
        """Sends a tree and returns its tensors in the order in which the other end counts them.

        What lies in the memory of a lender, a slot, is sent before that is given back.

        Raises:
            LayoutError: the tree holds something that cannot be sent.
        """
        tensors: list[Tensor] = []
        description = trees.describe(tree, tensors)
        if len(tensors) == 1 and not self._checksum:  # the common case, without bookkeeping
            layout = self._layouts.get(description) or self._announce(description)
            only = trees.as_sent(tensors[0], layout.strides[0])
            self._port.send(
                layout.handle, Tag(self._stage, self._kind, microbatch, rows, batch_rows, self._evaluates), (only,)
            )
            return tensors
        sums: Tensor | None = None
        if self._checksum:
            sums = torch.zeros(len(tensors), dtype=torch.int64)
            description = ("tuple", (description, trees.describe(sums, tensors)))
        layout = self._layouts.get(description) or self._announce(description)
        sent = [trees.as_sent(tensor, strides) for tensor, strides in zip(tensors, layout.strides, strict=True)]
        if sums is not None:
            sums.copy_(torch.tensor(checksums(sent[:-1]), dtype=torch.int64))
        self._port.send(
            layout.handle, Tag(self._stage, self._kind, microbatch, rows, batch_rows, self._evaluates), sent
        )
        return tensors if sums is None else tensors[:-1]

    def finish(self) -> None:
        """Ends a step: the caller may now overwrite what was sent, such as an input that went through unchanged."""
        self._port.finish()

    def _announce(self, description: trees.Description) -> _Outgoing:
        forgotten = 0
        if len(self._layouts) >= _MOST_LAYOUTS:
            forgotten = self._layouts.pop(next(iter(self._layouts))).handle.id
        specs = trees.tensor_specs(description)
        handle = self._port.announce(trees.encode(description), [spec.bytes for spec in specs], forgotten)
        layout = self._layouts[description] = _Outgoing(handle, tuple(spec.strides for spec in specs))
        return layout


def _uses(tensor: Tensor) -> int:
    """How many tensors share the tensor's storage, and then some, as torch counts them."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _fewest_uses() -> tuple[int, int]:
    """Of a tensor's storage: where it is alone, and where another tensor is kept on it."""
    # Asking for a storage makes a Python object of it, which some releases count. A mode may keep what it sees.
    with torch.inference_mode(False), _disable_current_modes():
        kept = torch.empty(1)
        return _uses(kept), _uses(kept.detach())


_FEWEST_USES = _fewest_uses()


def is_shared(tensors: list[Tensor], *, beside_kept: bool = False) -> bool:
    """Whether anybody but the list's owner has one of these tensors, in Python or C++, or another on their storage.

    Args:
        tensors: the list.
        beside_kept: whether the tensors' maker keeps one on each storage.
    """
    fewest = _FEWEST_USES[beside_kept]
    for tensor in tensors:
        mine = 3  # the list, the loop, getrefcount()
        count: int = tensor._use_count()  # type: ignore[attr-defined]
        if sys.getrefcount(tensor) > mine or count > 1 or _uses(tensor) > fewest:
            return True
    return False


class Received:
    """One message: its tree, whose tensors are views of a slot until release().

    Attributes:
        tree: what the sender sent.
        leaves: in training, the tensors that gradients are wanted for, in the sender's order; their `.grad` is
            filled by backward.
        rows, batch_rows: this microbatch's and the whole batch's share of the data, in rows; 0: unknown.
    """

    __slots__ = ("_beside", "_message", "_port", "_tensors", "batch_rows", "leaves", "rows", "tree")

    def __init__(
        self,
        port: ReceivePort,
        message: Inbound,
        tree: Any,
        tensors: list[Tensor],
        leaves: list[Tensor],
        beside: object | None,
    ) -> None:
        self._port = port
        self._message: Inbound | None = message
        self._tensors = tensors
        self._beside = beside  # what keeps one more tensor on each storage
        self.tree = tree
        self.leaves = leaves
        self.rows: int = message.rows
        self.batch_rows: int = message.batch_rows

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is the slot's, which will be overwritten."""
        message = self._message
        if message is None:
            return False
        for part in memory_parts(tensor):  # noqa: SIM110  no generator: this runs for every microbatch
            if self._port.holds(message, part):
                return True
        return False

    def is_shared(self) -> bool:
        """Whether somebody else has a tensor on this memory too: a hook that keeps it, a `.grad` that is a view of it.

        Only where the port's storages are apart. Somebody has the received tensor itself, in Python or in C++, or a
        view or an alias of it, which shares its storage.
        """
        return is_shared(self._tensors, beside_kept=self._beside is not None)

    def settle(self) -> None:
        """After the forward: a stage may have changed its input in place; the memory is its own."""

    def release(self, *, unseen: bool = False) -> None:
        """Gives the slot back. Whoever kept a tensor for a later backward will get autograd's version error.

        Args:
            unseen: whether nobody can have kept one.
        """
        message, self._message = self._message, None
        if message is None:
            return
        if not unseen:
            for tensor in self._tensors:
                if not tensor.is_inference():  # under inference_mode there are no versions
                    torch.autograd.graph.increment_version(tensor)
        self._tensors = []
        self.tree = self._beside = None
        self._port.release(message)


class ReceiveChannel:
    """The receiving end of one stage boundary in one direction.

    Attributes:
        posts: whether post() does anything; where it does not, a slot's release is all that its sender waits for.
    """

    def __init__(self, port: ReceivePort, source_stage: int, kind: Kind, checksum: bool = False) -> None:
        self._checksum = checksum
        self._port = self.port = port
        self.posts: bool = port.posts
        self.storages_apart: bool = port.storages_apart
        self._source_stage = source_stage
        self._kind_name = kind.label
        self._kind = kind.order
        self._evaluates = False
        self._layouts: dict[int, IncomingLayout] = {}
        self._arrivals = Arrivals(port)
        self.meshes: Meshes | None = None
        """The receiving stage's."""
        self._early: dict[int, Inbound] = {}

    @property
    def counters(self) -> dict[str, int]:
        """What the port has counted."""
        return self._port.counters

    def begin(self, *, training: bool) -> None:
        """Begins a step, whose messages must say of it what this says."""
        self._evaluates = not training
        self._arrivals.begin(training=training)

    def post(self, microbatch: int) -> None:
        """RECV: lets one more receive start, into a free slot."""
        self._port.post()

    def take(self, microbatch: int) -> None:
        """Waits for a message before it is used: its link carries it ahead of one that is used first."""
        self._early[microbatch] = self._port.receive(
            Tag(self._source_stage, self._kind, microbatch, 0, 0, self._evaluates)
        )

    def receive(self, microbatch: int, *, training: bool) -> Received:
        """Waits for the message of this microbatch.

        Args:
            microbatch: which one must come next, unless it was taken already.
            training: whether tensors that require gradients at the sender get leaves here.
        """
        port, arrivals = self._port, self._arrivals
        arrivals.prepare()
        message = self._early.pop(microbatch, None) if self._early else None
        if message is None:
            message = port.receive(Tag(self._source_stage, self._kind, microbatch, 0, 0, self._evaluates))
        layout = self._layouts.get(message.layout)
        if layout is None:
            layout = self._learn(message)
        tensors, leaves = arrivals.of(message, layout, training=training)
        if layout.is_tensor:
            return Received(port, message, tensors[0], tensors, leaves, arrivals.kept)
        if self._checksum:
            action = f"{self._source_stage}SEND_{self._kind_name}{microbatch}"
            compare_checksums(tensors[:-1], tensors[-1].tolist(), action)
        tree = trees.rebuild(layout.description, tensors, self.meshes)
        return Received(port, message, tree[0] if self._checksum else tree, tensors, leaves, arrivals.kept)

    def _learn(self, message: Inbound) -> IncomingLayout:
        number = message.layout
        description = trees.decode(self._port.description(number))
        specs = tuple(trees.tensor_specs(description))
        *offsets, size = _core.pack([min(spec.bytes, 1 << 62) for spec in specs])
        if size != message.size:
            raise MismatchError(f"a peer sent {message.size} bytes of a layout that takes {size}")
        if len(self._layouts) >= 2 * _MOST_LAYOUTS:
            self._layouts.pop(next(iter(self._layouts)))
        layout = self._layouts[number] = IncomingLayout(description, specs, tuple(offsets))
        return layout
