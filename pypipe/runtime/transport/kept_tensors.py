"""Tells, by the reference counts of torch and Python, whether anything else holds tensors that a stage was lent."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from pypipe.runtime.autograd.engine import enter
from pypipe.runtime.torch_private import storage_uses, without_modes

__all__ = ["has_shared_storage", "is_kept"]


def _uses(tensor: Tensor) -> tuple[int, int, int]:
    """How often a tensor is referred to from Python and from C++, and its storage from C++, as each counts itself."""
    in_core: int = tensor._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(tensor), in_core, storage_uses(tensor)


def _fewest_uses(*, entered: bool) -> tuple[int, int, int]:
    """`_uses` of a tensor that one list holds, alone on its storage.

    Counted and not written down: asking for a storage makes a Python object of it, which some releases count.

    Args:
        entered: whether it begins a graph, at whose end a leaf has the same storage.
    """
    with torch.inference_mode(False), torch.enable_grad(), without_modes():  # a dispatch mode may keep what it sees
        tensors = [torch.empty(1)]
        if entered:
            tensors = [enter(tensors[0].requires_grad_())]
        for tensor in tensors:
            uses = _uses(tensor)
        return uses


_ALONE, _ENTERED = _fewest_uses(entered=False), _fewest_uses(entered=True)


def has_shared_storage(tensor: Tensor) -> bool:
    """Whether another tensor has the same storage."""
    return _uses(tensor)[2] > _ALONE[2]


def is_kept(
    tensors: list[Tensor], *, entered: Sequence[bool] | None = None, beside: bool = False, ahead: bool = False
) -> bool:
    """Whether anything but this list has one of these tensors, in Python or in C++, or has another on their storage.

    Args:
        tensors: the list. Only its owner has it.
        entered: which of them begin a graph at whose end a leaf has the same storage; None: none of them.
        beside: whether one more tensor is known to be kept on each storage.
        ahead: whether the next message's tensors, the like of these, are there on each storage already.
    """
    turns = iter(entered) if entered is not None else itertools.repeat(False)
    for tensor in tensors:  # without enumerate() or zip(), whose tuples count as references
        is_entered = next(turns)
        python, core, storage = _ENTERED if is_entered else _ALONE
        if ahead:
            storage += 1 + is_entered
        uses = _uses(tensor)
        if uses[0] > python or uses[1] > core or uses[2] > storage + beside:
            return True
    return False
