"""Looks at, and frees, the tensors that nodes of an autograd graph save for their backward."""

from __future__ import annotations

import enum
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from pypipe.runtime.torch_private import SavedTensor

__all__ = ["Packed", "drop_saved", "drop_weights", "names_of_saved", "packed", "saves", "without_weights"]

# What these operations save follows from which of their inputs need gradients. Others save an input that may be there
# or not (an attention's mask), or what a user's Function likes.
_FIXED = {"Addmm", "Mm", "Bmm", "Baddbmm"}

# Whether this torch can say that hooks packed a saved tensor.
_sees_packing = hasattr(SavedTensor, "unpack_hook")
# Whether it can say that nothing was saved.
_sees_nothing = hasattr(SavedTensor, "data")


class Packed(enum.Enum):
    """What hooks did to what a node saved (torch.autograd.graph.saved_tensors_hooks)."""

    NO = enum.auto()
    BY_CHECKPOINT = enum.auto()
    MAYBE = enum.auto()


def saves(kind: type) -> bool:
    """Whether nodes of this class may save tensors."""
    return bool(_names(kind))


def names_of_saved(node: Any, operation: str | None) -> tuple[str, ...]:
    """Under which names a node of this operation may have saved something, in this graph and others of its structure.

    Looking at an empty one costs time.
    """
    names = _names(type(node))
    if operation not in _FIXED or not (_sees_nothing and _sees_packing):
        return tuple(names)
    return tuple(name for name in names if not _is_empty(getattr(node, name)))


def _is_empty(saved: Any) -> bool:
    return saved.data is None and saved.unpack_hook is None  # a hook may have packed it into None


def packed(node: Any, names: tuple[str, ...]) -> Packed:
    """Tells whether hooks packed what a node saved under these names.

    `MAYBE` stands for hooks other than a checkpoint's, and for a torch that cannot tell.
    """
    if not _sees_packing:
        return Packed.MAYBE
    for name in names:
        for saved in _as_tuple(getattr(node, name)):
            hook = saved.unpack_hook
            if hook is not None:
                by_checkpoint = getattr(hook, "__module__", None) == "torch.utils.checkpoint"
                return Packed.BY_CHECKPOINT if by_checkpoint else Packed.MAYBE
    return Packed.NO


def _as_tuple(saved: Any) -> tuple[Any, ...]:
    return saved if isinstance(saved, tuple) else (saved,)


def _names(kind: type) -> list[str]:
    names = _names_by_kind.get(kind)
    if names is None:
        names = _names_by_kind[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    return names


_names_by_kind: dict[type, list[str]] = {}


def drop_saved(node: Any, names: tuple[str, ...]) -> None:
    """Frees what a node saved under these names, although other nodes may keep the node itself alive.

    By itself torch frees saved tensors after a backward through the whole graph, or with the graph. But it lets packing
    hooks be registered for what was saved, and these may pack it into nothing (here: a number).
    """
    for name in names:
        for saved in _as_tuple(getattr(node, name)):
            if _sees_nothing and saved.data is None:  # cheaper than catching the error
                continue
            try:
                saved.register_hooks(id, _forgotten)
            except RuntimeError:  # nothing was saved, or other hooks have packed it
                continue
    if isinstance(node, BackwardCFunction):
        vars(node).clear()


def drop_weights(node: Any, operation: str | None, wanted: set[int]) -> None:
    """Frees a weight that a node saved for the gradients of edges (positions) that are no longer wanted.

    A weight that was computed (cast by autocast, say) is a copy, which lives as long as what saved it.
    """
    for name, edge, _ in _SAVED_FOR.get(operation or "", ()):
        if edge not in wanted:
            try:
                getattr(node, name).register_hooks(_shape_of, _itself)
            except RuntimeError:  # as above
                continue


# What an operation saves for one edge's gradient alone: the name, that edge, and the edge whose value it is.
_SAVED_FOR = {
    "Addmm": (("_raw_saved_mat1", 2, 1), ("_raw_saved_mat2", 1, 2)),
    "Mm": (("_raw_saved_self", 1, 0), ("_raw_saved_mat2", 0, 1)),
    "Bmm": (("_raw_saved_self", 1, 0), ("_raw_saved_mat2", 0, 1)),
    "Convolution": (("_raw_saved_weight", 0, 1),),
}


def without_weights(operation: str | None, names: tuple[str, ...], weights: set[int]) -> tuple[str, ...]:
    """The names under which a node may have saved something, but for the values of its weights.

    Weights stay alive anyway, or are freed by drop_weights().

    Args:
        weights: the edges (positions) that lead to weights.
    """
    values = {name for name, edge, of in _SAVED_FOR.get(operation or "", ()) if of in weights and edge not in weights}
    return tuple(name for name in names if name not in values)


def _shape_of(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(()).expand(tensor.shape)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _forgotten(_: int) -> Tensor:
    raise RuntimeError(
        "a backward runs a second time through the graph of a stage, whose first was split in two halves and freed it"
    )
