"""Cutting a batch into microbatches, and putting outputs together again.

Sizes are those of torch.tensor_split: a batch of N rows makes M microbatches of N // M rows, the first N % M of them
one row longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pypipe.errors import InputError
from pypipe.runtime.backward import enter

__all__ = ["Cuttable", "Pieces", "Reduce", "Replicate", "TensorChunkSpec", "merge", "require_mergeable", "sizes"]


class TensorChunkSpec:
    """Cut a tensor (or join outputs) along one dimension.

    Args:
        split_dim: the dimension; negative ones count from the end.
    """

    def __init__(self, split_dim: int) -> None:
        self.split_dim = split_dim

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[int, ...]) -> tuple[TensorChunkSpec, ...]:
        """One spec for each positional argument."""
        return tuple(TensorChunkSpec(dim) for dim in chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: dict[str, int]) -> dict[str, TensorChunkSpec]:
        """One spec for each keyword argument."""
        return {name: TensorChunkSpec(dim) for name, dim in chunk_dims.items()}


class Replicate:
    """Give every microbatch the whole value; of outputs, take the last microbatch's."""

    def __repr__(self) -> str:
        return "Replicate()"


class Reduce:
    """Join outputs by folding them, microbatch by microbatch.

    Args:
        init_value: what to start from.
        reduce_fn: called with what there is so far and the next microbatch's value.
    """

    def __init__(self, init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> None:
        self.init_value = init_value
        self.reduce_fn = reduce_fn


def sizes(rows: int, n_microbatches: int) -> list[int]:
    """Rows of each microbatch: torch.tensor_split's."""
    share, longer = divmod(rows, n_microbatches)
    return [share + 1] * longer + [share] * (n_microbatches - longer)


class _Leaf:
    """One value of a tree that is to be cut: the dimension, or None where every microbatch gets all of it."""

    __slots__ = ("dim", "value")

    def __init__(self, value: Any, dim: int | None) -> None:
        self.value = value
        self.dim = dim

    @property
    def rows(self) -> int:
        assert self.dim is not None
        return int(self.value.shape[self.dim])


def _is_replicate(spec: Any) -> bool:
    # torch.distributed.pipelining's own class is private, but scripts that use it should keep working.
    # They give the class as well as an object of it.
    kind = spec if isinstance(spec, type) else type(spec)
    return issubclass(kind, Replicate) or kind.__name__ == "_Replicate"


def _dimension(spec: Any, tensor: Tensor, path: Callable[[], str]) -> int | None:
    if spec is None:
        return 0 if tensor.dim() > 0 else None
    if _is_replicate(spec):
        return None
    dim = spec if isinstance(spec, int) else getattr(spec, "split_dim", None)
    if not isinstance(dim, int):
        raise InputError(f"the chunk spec of {path()} is {spec!r}: use TensorChunkSpec(dim), Replicate() or None")
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(
            f"{path()} has {tensor.dim()} dimensions (shape {tuple(tensor.shape)}), so it cannot be cut along "
            f"dimension {dim}: change its chunk spec"
        )
    return dim % tensor.dim()


def _is_chunk_spec(spec: Any) -> bool:
    """Whether it is one spec, and no tree of them; None and a number say a dimension."""
    return spec is None or isinstance(spec, int) or hasattr(spec, "split_dim") or _is_replicate(spec)


def _broadcast(spec: Any, tree: Any, path: str) -> list[Any]:
    """One spec for each leaf of `tree`."""
    if _is_chunk_spec(spec):
        return [spec] * len(pytree.tree_leaves(tree))
    if isinstance(tree, dict) and isinstance(spec, dict):
        unknown = [key for key in spec if key not in tree]
        if unknown:
            raise InputError(f"there is a chunk spec for {path}[{unknown[0]!r}], but no such argument was given")
        return [leaf for key in tree for leaf in _broadcast(spec.get(key), tree[key], f"{path}[{key!r}]")]
    if isinstance(tree, (tuple, list)) and isinstance(spec, (tuple, list)):
        if len(spec) != len(tree):
            raise InputError(f"there are {len(spec)} chunk specs for {path}, which has {len(tree)} values")
        return [
            leaf
            for i, (part, value) in enumerate(zip(spec, tree, strict=True))
            for leaf in _broadcast(part, value, f"{path}[{i}]")
        ]
    raise InputError(
        f"the chunk spec {spec!r} does not fit {path}, a {type(tree).__name__}: use TensorChunkSpec(dim), Replicate() "
        "or None, nested as the arguments are"
    )


_Rebuild = Callable[[list[Any]], Any]


def _flatten(tree: Any) -> tuple[list[Any], _Rebuild]:
    """A tree's leaves, and what makes a tree like it of other leaves.

    The first forward waits for this: what most batches are, a tensor or a tuple of tensors, takes one look here, where
    pytree takes dozens of calls.
    """
    if tree is None or isinstance(tree, Tensor):
        return [tree], _only
    if type(tree) is tuple and all(isinstance(value, Tensor) for value in tree):
        return list(tree), tuple
    values, structure = pytree.tree_flatten(tree)
    return values, structure.unflatten


def _only(values: list[Any]) -> Any:
    (value,) = values
    return value


class Cuttable:
    """A tree of tensors and other values, of which tensors are cut into microbatches and the rest is given to all.

    Args:
        tree: arguments, keyword arguments or a target, of any nesting.
        spec: chunk specs of the same nesting, or a prefix of it, or None (dimension 0).
        name: how messages call it.

    Raises:
        InputError: a spec does not fit.
    """

    def __init__(self, tree: Any, spec: Any, name: str) -> None:
        self.name = name
        self._tree = tree
        values, self._rebuild = _flatten(tree)
        specs = [spec] * len(values) if _is_chunk_spec(spec) else _broadcast(spec, tree, name)
        self._leaves = [
            _Leaf(value, _dimension(its_spec, value, partial(self._path, i)) if isinstance(value, Tensor) else None)
            for i, (value, its_spec) in enumerate(zip(values, specs, strict=True))
        ]

    def _path(self, leaf: int) -> str:
        return self.name + pytree.keystr(pytree.tree_flatten_with_path(self._tree)[0][leaf][0])

    def replace(self, function: Callable[[Tensor], Tensor]) -> None:
        """Puts `function(tensor)`, of the same shape, in each tensor's place."""
        for leaf in self._leaves:
            if isinstance(leaf.value, Tensor):
                leaf.value = function(leaf.value)

    def rows(self, beside: Cuttable | None = None) -> int:
        """The length of every tensor along the dimension that it is cut along; 0 where none is cut.

        Args:
            beside: another tree, whose tensors have the same length.

        Raises:
            InputError: lengths differ.
        """
        rows = 0
        first: tuple[Cuttable, int] | None = None
        for tree in (self,) if beside is None else (self, beside):
            for i, leaf in enumerate(tree._leaves):
                if leaf.dim is None:
                    continue
                if first is not None and leaf.rows != rows:
                    raise _differing(*first, tree, i)
                rows, first = leaf.rows, first or (tree, i)
        return rows

    def pieces(self, n_microbatches: int, *, batch_rows: int = 0, scaled: bool = False) -> Pieces:
        """One tree for each microbatch.

        Args:
            n_microbatches: M.
            batch_rows: rows of the batch where the first stage has told; 0: the tree's own length counts.
            scaled: whether a length that is a multiple of `batch_rows` is cut in proportion (a flattened target).

        Raises:
            InputError: fewer rows than microbatches, or lengths that differ.
        """
        rows = self.rows()
        if not any(leaf.dim is not None for leaf in self._leaves):
            return Pieces(self._leaves, self._rebuild, [0] * n_microbatches)
        batch_rows = batch_rows or rows
        if rows != batch_rows and not (scaled and batch_rows and rows % batch_rows == 0 and rows > 0):
            raise InputError(
                f"{self.name} has {rows} rows, but the batch that the first stage got has {batch_rows}: give each rank "
                "the same batch. A tensor that is not cut along the batch gets Replicate() in its chunk spec"
            )
        if batch_rows < n_microbatches:
            raise InputError(
                f"{self.name} has {batch_rows} rows, too few for {n_microbatches} microbatches: "
                f"build the schedule with n_microbatches <= {max(batch_rows, 1)}, or give a larger batch"
            )
        scale = rows // batch_rows
        return Pieces(self._leaves, self._rebuild, [size * scale for size in sizes(batch_rows, n_microbatches)])


def _differing(tree: Cuttable, i: int, other: Cuttable, j: int) -> InputError:
    a, b = tree._leaves[i], other._leaves[j]
    return InputError(
        f"{tree._path(i)} has {a.rows} rows (shape {tuple(a.value.shape)}), {other._path(j)} has {b.rows} "
        f"(shape {tuple(b.value.shape)}): tensors of one batch have one length. One that is not cut "
        "along the batch gets Replicate() in args_chunk_spec or kwargs_chunk_spec"
    )


class Pieces(Sequence[Any]):
    """The microbatches' trees, each with tensors of its own. The first one that is asked for is made by itself, so that
    the pipeline need not wait for the others; they are made when the second one is asked for."""

    def __init__(self, leaves: Sequence[_Leaf], rebuild: _Rebuild, cuts: Sequence[int]) -> None:
        self._leaves = leaves
        self._rebuild = rebuild
        self._cuts = cuts
        self._first: tuple[int, Any] | None = None
        self._made: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._cuts)

    def __getitem__(self, microbatch: Any) -> Any:
        if self._made is not None:
            return self._made[microbatch]
        microbatch = range(len(self._cuts))[microbatch]
        if self._first is None:
            start, size = sum(self._cuts[:microbatch]), self._cuts[microbatch]
            cut = [leaf.value if leaf.dim is None else _cut(leaf.value, start, size, leaf.dim) for leaf in self._leaves]
            self._first = microbatch, self._rebuild(cut)
        number, first = self._first
        if microbatch == number:
            return first
        columns = [
            [leaf.value] * len(self._cuts) if leaf.dim is None else _cut_all(leaf.value, self._cuts, leaf.dim)
            for leaf in self._leaves
        ]
        rows = zip(*columns, strict=True) if columns else [()] * len(self._cuts)
        self._made = [self._rebuild(list(row)) for row in rows]
        self._made[number] = first
        return self._made[microbatch]


def _cut(tensor: Tensor, start: int, size: int, dim: int) -> Tensor:
    piece = tensor.narrow(dim, start, size)
    return piece.data if _is_plain(tensor) else enter(piece)


def _cut_all(tensor: Tensor, cuts: Sequence[int], dim: int) -> list[Tensor]:
    if _is_plain(tensor):
        return [piece.data for piece in torch.split(tensor, list(cuts), dim)]
    # One by one: pieces that split() makes share one node, which backward may walk only once.
    return [_cut(tensor, end - size, size, dim) for end, size in zip(itertools.accumulate(cuts), cuts, strict=True)]


def _is_plain(tensor: Tensor) -> bool:
    """Whether `data` is what enter() makes of it, in a tenth of the time: it has no gradient and no ways of its own."""
    return type(tensor) is Tensor and not tensor.requires_grad


def merge(outputs: Sequence[Any], spec: Any) -> Any:
    """Puts the outputs of all microbatches together: tensors along dimension 0, 0-d tensors into one vector.

    Args:
        outputs: one tree for each microbatch.
        spec: a tree of TensorChunkSpec, Replicate or Reduce, of the outputs' nesting or a prefix of it, or None.

    Raises:
        InputError: the outputs' trees differ, or the spec does not fit.
    """
    flat = [pytree.tree_flatten(output) for output in outputs]
    structure = flat[0][1]
    for microbatch, (_, other) in enumerate(flat):
        if other != structure:
            raise InputError(
                f"the outputs of microbatches 0 and {microbatch} differ in structure ({structure} and {other}), so "
                "they cannot be merged: pass return_outputs=False and use the losses"
            )
    if isinstance(outputs[0], Tensor) and isinstance(spec, (tuple, list)) and len(spec) == 1:
        # torch's classes treat one tensor as a tuple of one, and return it as one where the spec is one.
        return (merge(outputs, spec[0]),)
    specs = _broadcast_merge(spec, outputs[0])
    columns = zip(*(values for values, _ in flat), strict=True)
    merged = [_merge_leaf(list(column), its_spec) for column, its_spec in zip(columns, specs, strict=True)]
    return pytree.tree_unflatten(merged, structure)


def require_mergeable(output: Any, spec: Any) -> None:
    """Whether one microbatch's output is such that merge() has a use for it, as far as one output can tell.

    Raises:
        InputError: the spec does not fit.
    """
    if isinstance(output, Tensor) and isinstance(spec, (tuple, list)) and len(spec) == 1:
        spec = spec[0]
    for value, its_spec in zip(pytree.tree_leaves(output), _broadcast_merge(spec, output), strict=True):
        if isinstance(value, Tensor) and not hasattr(its_spec, "reduce_fn") and not _is_replicate(its_spec):
            dim = _merge_dim(its_spec)
            if value.dim() and not -value.dim() <= dim < value.dim():
                raise InputError(
                    f"a microbatch's output has the shape {tuple(value.shape)}, which cannot be joined along dimension "
                    f"{dim}: pass an output_merge_spec that fits it, or return_outputs=False and use the losses"
                )


def _broadcast_merge(spec: Any, output: Any) -> list[Any]:
    if hasattr(spec, "reduce_fn") or isinstance(spec, str):
        return [spec] * len(pytree.tree_leaves(output))
    if isinstance(output, dict) and isinstance(spec, dict):
        unknown = [key for key in spec if key not in output]
        if unknown:
            raise InputError(f"there is a merge spec for ['{unknown[0]}'], but the output has no such value")
        return [leaf for key in output for leaf in _broadcast_merge(spec.get(key), output[key])]
    if isinstance(output, (tuple, list)) and isinstance(spec, (tuple, list)) and len(spec) == len(output):
        return [leaf for part, value in zip(spec, output, strict=True) for leaf in _broadcast_merge(part, value)]
    if _is_chunk_spec(spec):
        return [spec] * len(pytree.tree_leaves(output))
    if isinstance(output, (tuple, list)) and isinstance(spec, (tuple, list)):
        raise InputError(f"output_merge_spec has {len(spec)} specs for an output of {len(output)} values")
    raise InputError(
        f"output_merge_spec has {spec!r} for an output that is a {type(output).__name__}: give a TensorChunkSpec(dim), "
        "Replicate() or Reduce(...) for each of its tensors, nested as the output is, or None"
    )


def _merge_dim(spec: Any) -> int:
    dim = 0 if spec is None else spec if isinstance(spec, int) else getattr(spec, "split_dim", None)
    if not isinstance(dim, int):
        raise InputError(f"the merge spec {spec!r} is none: use TensorChunkSpec(dim), Replicate(), Reduce(...) or None")
    return dim


def _merge_leaf(values: list[Any], spec: Any) -> Any:
    if hasattr(spec, "reduce_fn"):
        total = spec.init_value
        for value in values:
            total = spec.reduce_fn(total, value)
        return total
    if _is_replicate(spec):
        return values[-1]
    tensors = [isinstance(value, Tensor) for value in values]
    if not any(tensors):
        return values[-1]
    if not all(tensors):
        other = tensors.index(not tensors[0])
        raise InputError(
            f"the outputs of microbatches 0 and {other} differ ({type(values[0]).__name__} and "
            f"{type(values[other]).__name__}), so they cannot be merged: pass return_outputs=False and use the losses"
        )
    dim = _merge_dim(spec)
    try:
        return torch.stack(values) if values[0].dim() == 0 else torch.cat(values, dim)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(dict.fromkeys(str(tuple(value.shape)) for value in values))
        raise InputError(
            f"the microbatches' outputs, of shape {shapes}, cannot be joined along dimension {dim} ({error}): pass an "
            "output_merge_spec that fits them, or return_outputs=False and use the losses"
        ) from error
