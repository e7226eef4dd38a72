"""Looks for rows of the batch in values that are not tensors: they would go whole, and wrong, to every microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pypipe.runtime.batch.structure import Path, open_node

__all__ = ["Rows", "is_array", "rows_within"]

_NUMBERS = (bool, int, float, complex)


class Rows(NamedTuple):
    """A value that has one row, or one item, for each of the batch's."""

    path: Path
    value: Any


def is_array(value: Any) -> bool:
    """Whether it has rows as an array of numpy does, and is not a tensor."""
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and len(shape) > 0 and hasattr(value, "__array__") and not isinstance(value, Tensor)


def rows_within(value: Any, path: Path, rows: int, *, lists: bool, dims: Sequence[int] = ()) -> Rows | None:
    """Finds the first array of this length in a value, or list or tuple of so many values of one kind; else None.

    Args:
        value: not a tensor that is cut.
        path: its place.
        rows: the batch's.
        lists: whether lists and tuples count. As an argument, one may well hold sizes or flags.
        dims: the dimensions of tensors that count; none where those are cut.
    """
    if isinstance(value, Tensor) and any(_length(value, dim) == rows for dim in dims):
        return Rows(path, value)
    if value is None or isinstance(value, (*_NUMBERS, str, bytes, Tensor)):
        return None
    if is_array(value):
        return Rows(path, value) if value.shape[0] == rows else None
    node = open_node(value)
    if node is None:
        return None
    if lists and type(value) in (list, tuple) and len(value) == rows and len({_kind(item) for item in value}) == 1:
        return Rows(path, value)
    for key, item in zip(node.keys, node.values, strict=True):
        found = rows_within(item, (path, node.separator, key), rows, lists=lists, dims=dims)
        if found is not None:
            return found
    return None


def _length(tensor: Tensor, dim: int) -> int | None:
    if tensor.is_nested:
        return int(tensor.size(0)) if dim == 0 else None
    return tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else None


def _kind(value: Any) -> type:
    return float if isinstance(value, _NUMBERS) else type(value)
