"""The tensors that nodes of an autograd graph save for their backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

__all__ = ["drop_saved", "packed", "packed_by_checkpoint", "saved_by", "saves"]

# Whether this torch can say that hooks packed a saved tensor.
_sees_packing = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


def saves(node: Any) -> bool:
    """Whether nodes of its kind may save tensors."""
    return bool(_names(type(node)))


def saved_by(node: Any) -> Iterator[Any]:
    """What a node saved (torch's SavedTensor)."""
    for name in _names(type(node)):
        saved = getattr(node, name)
        if isinstance(saved, tuple):
            yield from saved
        else:
            yield saved


def _names(kind: type) -> list[str]:
    names = _names_by_kind.get(kind)
    if names is None:
        names = _names_by_kind[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    return names


_names_by_kind: dict[type, list[str]] = {}


def packed(saved: Any) -> bool:
    """Whether hooks may have packed it (torch.autograd.graph.saved_tensors_hooks)."""
    return not _sees_packing or saved.unpack_hook is not None


def packed_by_checkpoint(saved: Any) -> bool:
    """Whether activation checkpointing is known to have packed it: it will be recomputed."""
    return _sees_packing and getattr(saved.unpack_hook, "__module__", None) == "torch.utils.checkpoint"


def drop_saved(node: Any) -> None:
    """Frees what a node saved. Others in the graph may keep the node itself.

    torch frees what is saved after a backward through the whole graph, or with the graph. But packing hooks may be
    registered for what was saved, and pack it into nothing.
    """
    for saved in saved_by(node):
        try:
            saved.register_hooks(_forget, _forgotten)
        except RuntimeError:  # there was nothing, or somebody else's hooks hold it
            continue
    if isinstance(node, BackwardCFunction):
        vars(node).clear()


def _forget(_: Tensor) -> None:
    return None


def _forgotten(_: None) -> Tensor:
    raise RuntimeError(
        "a backward runs a second time through the graph of a stage, whose first was split in two halves and freed it"
    )
