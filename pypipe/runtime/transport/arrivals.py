"""The tensors in which messages arrive.

They are views of a slot, and new objects for every message. torch's operations take several times as long right after a
stage has run, which has taken the caches. So where a slot's memory stays in its place, a tensor on it is kept, of which
a message's is the detached copy, in one operation; and what a leaf takes more is made while there is time, before the
slot's next message is waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pypipe.runtime.autograd.engine import enter
from pypipe.runtime.transport import trees

__all__ = ["Arrivals", "IncomingLayout"]

Made = tuple[list[Tensor], list[Tensor]]
"""One message's tensors, and in training those leaves that gradients are wanted for, both in the layout's order."""


class IncomingLayout:
    """A layout as its receiver uses it."""

    __slots__ = ("description", "has_leaves", "is_tensor", "offsets", "specs")

    def __init__(
        self, description: trees.Description, specs: tuple[trees.TensorSpec, ...], offsets: tuple[int, ...]
    ) -> None:
        self.description = description
        self.specs = specs
        self.offsets = offsets
        self.is_tensor: bool = description[0] == "T"  # and nothing around it
        self.has_leaves = any(spec.requires_grad for spec in specs)


class Arrivals:
    """Makes the tensors of one channel's messages.

    Args:
        port: the channel's receiving end.
    """

    def __init__(self, port: Any) -> None:
        self._port = port
        self._can = bool(port.slots_stay)
        self._layout: IncomingLayout | None = None  # that tensors are kept and made ahead for
        self._last: Any = None  # message
        self._memory = 0  # that these slots lie in
        self._kept: dict[int, list[Tensor]] = {}  # by slot
        self._made: dict[int, Made] = {}  # by slot
        self._keeps = False

    def begin(self, *, training: bool) -> None:
        """Begins a step.

        Tensors are kept and made ahead only if they are what they would be later: no mode changes them.
        """
        self._keeps = (
            self._can
            and training
            and torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
            and torch._C._len_torch_dispatch_stack() == 0
            and torch._C._len_torch_function_stack() == 0
        )

    @property
    def kept(self) -> dict[int, list[Tensor]] | None:
        """What keeps one more tensor on the memory of each of a message's tensors, as long as somebody has it.

        None: nothing does.
        """
        return self._kept if self._keeps else None

    def prepare(self) -> None:
        """Makes what the next message in the last one's slot needs, if it is of the same layout."""
        message = self._last
        if message is None or self._layout is None or not self._keeps:
            return
        self._last = None
        self._made[message.pointer] = self._make(message, self._layout, training=True)

    def of(self, message: Any, layout: IncomingLayout, *, training: bool) -> Made:
        """A message's tensors."""
        if not self._keeps:
            return self._make(message, layout, training=training)
        if layout is not self._layout:
            self._layout = layout
            self._forget()
        if not (training and layout.has_leaves):
            return self._make(message, layout, training=training)
        self._last = message
        return self._made.pop(message.pointer, None) or self._make(message, layout, training=True)

    def _make(self, message: Any, layout: IncomingLayout, *, training: bool) -> Made:
        if not self._keeps:
            tensors = self._on_slot(message, layout)
        else:
            kept = self._kept.get(message.pointer)
            if kept is None:
                if message.memory != self._memory:  # the slots have grown: let go of the old ones
                    self._memory = message.memory
                    self._forget()
                kept = self._kept[message.pointer] = self._on_slot(message, layout)
            tensors = [tensor.detach() for tensor in kept]
        leaves: list[Tensor] = []
        if training and layout.has_leaves:
            for position, spec in enumerate(layout.specs):
                if spec.requires_grad:
                    leaf = tensors[position].requires_grad_()
                    leaves.append(leaf)
                    tensors[position] = enter(leaf)
        return tensors, leaves

    def _forget(self) -> None:
        self._kept = {}  # a new one: messages that are still in use have the old one
        self._made = {}
        self._last = None

    def _on_slot(self, message: Any, layout: IncomingLayout) -> list[Tensor]:
        tensor = self._port.tensor
        return [tensor(message, spec, offset) for spec, offset in zip(layout.specs, layout.offsets, strict=True)]
