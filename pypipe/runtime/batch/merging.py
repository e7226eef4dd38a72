"""Joins the microbatches' outputs.

Tensors are joined. Any other value is returned if it is the same in all microbatches: else there is no telling what it
would be for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pypipe.errors import InputError
from pypipe.runtime.batch.chunk_specs import is_chunk_spec, is_replicate
from pypipe.runtime.batch.rows_uncut import is_array
from pypipe.runtime.batch.structure import CannotRebuild, Node, Path, class_text, has_tensors, open_node, path_text

__all__ = ["merge", "require_alike", "require_mergeable"]


def merge(outputs: Sequence[Any], spec: Any) -> Any:
    """Puts the outputs of all microbatches together: tensors along dimension 0, 0-d tensors into one vector.

    A vector has one element for each microbatch. Of other values that are the same in all microbatches, the last one's
    is returned.

    Args:
        outputs: one tree for each microbatch.
        spec: a tree of TensorChunkSpec, Replicate or Reduce, of the outputs' nesting or a prefix of it, or None.

    Raises:
        InputError: the outputs' trees differ, or values in them that are no tensors, or the spec does not fit.
    """
    if isinstance(outputs[0], Tensor) and isinstance(spec, (tuple, list)) and len(spec) == 1:
        # torch's classes treat one tensor as a tuple of one, and return it as one where the spec is one.
        return (merge(outputs, spec[0]),)
    return _merge(outputs, spec, ("the output",))


def _merge(outputs: Sequence[Any], spec: Any, path: Path) -> Any:
    node = open_node(outputs[0])
    if node is None:
        return _merge_leaf(outputs, _one(spec, outputs[0]), path)
    if not node.plain and not hasattr(spec, "reduce_fn") and not any(has_tensors(output) for output in outputs):
        return _only_value(outputs, spec, path)
    nodes = [node, *(_like(node, outputs[0], output, number) for number, output in enumerate(outputs[1:], 1))]
    columns = zip(*(each.values for each in nodes), strict=True)
    values = [
        _merge(column, its_spec, (path, node.separator, key))
        for key, column, its_spec in zip(node.keys, columns, _parts(spec, outputs[0], node), strict=True)
    ]
    try:
        return node.rebuild(values)
    except CannotRebuild as error:
        raise InputError(
            f"{path_text(path)} cannot be joined: {error}; or pass return_outputs=False and use the losses"
        ) from error


def _like(node: Node, first: Any, output: Any, microbatch: int) -> Node:
    """The container that a later microbatch's output is, which must be as the first one's."""
    other = open_node(output)
    if other is None or other.shape != node.shape:
        raise InputError(
            f"the outputs of microbatches 0 and {microbatch} differ in structure ({_shape(first)} and "
            f"{_shape(output)}), so they cannot be merged: pass return_outputs=False and use the losses"
        )
    return other


def _shape(output: Any) -> str:
    node = open_node(output)
    if node is None:
        return type(output).__name__
    return f"{type(output).__name__} of {', '.join(str(key) for key in node.keys) or 'nothing'}"


def require_mergeable(output: Any, spec: Any) -> None:
    """Whether one microbatch's output is such that merge() has a use for it, as far as one output can tell.

    Raises:
        InputError: the spec does not fit.
    """
    if isinstance(output, Tensor) and isinstance(spec, (tuple, list)) and len(spec) == 1:
        spec = spec[0]
    _require_mergeable(output, spec)


def _require_mergeable(value: Any, spec: Any) -> None:
    node = open_node(value)
    if node is not None:
        for its_value, its_spec in zip(node.values, _parts(spec, value, node), strict=True):
            _require_mergeable(its_value, its_spec)
        return
    spec = _one(spec, value)
    if isinstance(value, Tensor) and not hasattr(spec, "reduce_fn") and not is_replicate(spec):
        dim = _merge_dim(spec)
        if value.is_nested:
            _require_first(dim)
        elif value.dim() and not -value.dim() <= dim < value.dim():
            raise InputError(
                f"a microbatch's output has the shape {tuple(value.shape)}, which cannot be joined along dimension "
                f"{dim}: pass an output_merge_spec that fits it, or return_outputs=False and use the losses"
            )


def require_alike(first: Any, output: Any, microbatch: int, spec: Any) -> None:
    """Requires that a later microbatch's output can be merged with the first one's, as far as looking costs nothing.

    It looks at the structure, and at what is not a tensor.

    Raises:
        InputError: they differ.
    """
    if not isinstance(output, Tensor):
        _require_alike(first, output, microbatch, spec, ("the output",))


def _require_alike(first: Any, output: Any, microbatch: int, spec: Any, path: Path) -> None:
    if isinstance(first, Tensor) or hasattr(spec, "reduce_fn") or is_replicate(spec):
        return  # merge() reports whatever else is wrong
    node = open_node(first)
    if node is None or (not node.plain and not has_tensors(first) and not has_tensors(output)):
        if not isinstance(output, Tensor):
            _require_same(first, output, microbatch, path)
        return
    other = _like(node, first, output, microbatch)
    columns = zip(node.keys, node.values, other.values, _parts(spec, first, node), strict=True)
    for key, its_first, its_output, its_spec in columns:
        _require_alike(its_first, its_output, microbatch, its_spec, (path, node.separator, key))


def _is_one(spec: Any) -> bool:
    return hasattr(spec, "reduce_fn") or isinstance(spec, str) or is_chunk_spec(spec)


def _one(spec: Any, output: Any) -> Any:
    if _is_one(spec):
        return spec
    raise _does_not_fit(spec, output)


def _parts(spec: Any, output: Any, node: Node) -> Sequence[Any]:
    """The merge spec of each value of a container."""
    if _is_one(spec):
        return [spec] * len(node.values)
    if (node.separator == "." or isinstance(output, dict)) and isinstance(spec, dict):
        unknown = [key for key in spec if key not in node.keys]
        if unknown:
            raise InputError(f"there is a merge spec for ['{unknown[0]}'], but the output has no such value")
        return [spec.get(key) for key in node.keys]
    if isinstance(output, (tuple, list)) and isinstance(spec, (tuple, list)):
        if len(spec) != len(output):
            raise InputError(f"output_merge_spec has {len(spec)} specs for an output of {len(output)} values")
        return spec
    raise _does_not_fit(spec, output)


def _does_not_fit(spec: Any, output: Any) -> InputError:
    return InputError(
        f"output_merge_spec has {spec!r} for an output that is a {type(output).__name__}: give a TensorChunkSpec(dim), "
        "Replicate() or Reduce(...) for each of its tensors, nested as the output is, or None"
    )


def _merge_dim(spec: Any) -> int:
    dim = 0 if spec is None else spec if isinstance(spec, int) else getattr(spec, "split_dim", None)
    if not isinstance(dim, int):
        raise InputError(
            f"the merge spec {spec!r} is not valid: use TensorChunkSpec(dim), Replicate(), Reduce(...) or None"
        )
    return dim


def _require_first(dim: int) -> None:
    if dim != 0:
        raise InputError(
            f"a microbatch's output is a nested tensor, which is joined along dimension 0 and not along {dim}: change "
            "output_merge_spec"
        )


def _only_value(values: Sequence[Any], spec: Any, path: Path) -> Any:
    """What is not a tensor: the last microbatch's, if all have the same, or where Replicate() asks for it."""
    if not is_replicate(spec):
        for microbatch, value in enumerate(values[1:], 1):
            _require_same(values[0], value, microbatch, path)
    return values[-1]


def _require_same(first: Any, value: Any, microbatch: int, path: Path) -> None:
    if not _is_same(first, value):
        raise InputError(
            f"{path_text(path)} is a {class_text(first)}, which is not joined, and microbatches 0 and {microbatch} "
            f"have different ones ({_short(first)} and {_short(value)}): return a tensor (a number as "
            "torch.tensor(...), of which there is then one for each microbatch); or say with output_merge_spec what to "
            "do with it: Replicate() takes the last one's, Reduce(...) folds them; or pass return_outputs=False and "
            "use the losses"
        )


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or is_array(one):  # an array's rows may be equal by accident
        return False
    try:
        return bool(one == other) or (bool(one != one) and bool(other != other))  # NaN is the same as NaN
    except Exception:
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _merge_leaf(values: Sequence[Any], spec: Any, path: Path) -> Any:
    if hasattr(spec, "reduce_fn"):
        total = spec.init_value
        for value in values:
            total = spec.reduce_fn(total, value)
        return total
    if is_replicate(spec):
        return values[-1]
    tensors = [isinstance(value, Tensor) for value in values]
    if not any(tensors):
        return _only_value(values, spec, path)
    if not all(tensors):
        other = tensors.index(not tensors[0])
        raise InputError(
            f"the outputs of microbatches 0 and {other} differ ({type(values[0]).__name__} and "
            f"{type(values[other]).__name__}), so they cannot be merged: pass return_outputs=False and use the losses"
        )
    dim = _merge_dim(spec)
    if all(value.is_nested for value in values):
        _require_first(dim)
        components = [component for value in values for component in value.unbind()]
        joined: Tensor = torch.nested.as_nested_tensor(components, layout=values[0].layout)
        return joined
    try:
        return torch.stack(list(values)) if values[0].dim() == 0 else torch.cat(list(values), dim)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(dict.fromkeys(str(tuple(value.shape)) for value in values))
        raise InputError(
            f"the microbatches' outputs, of shape {shapes}, cannot be joined along dimension {dim} ({error}): pass an "
            "output_merge_spec that fits them, or return_outputs=False and use the losses"
        ) from error
