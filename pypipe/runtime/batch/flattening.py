"""Flattens a tree of values and chunk specs to its leaves, and rebuilds trees like it of their pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pypipe.errors import InputError
from pypipe.runtime.batch.chunk_specs import is_chunk_spec, is_replicate
from pypipe.runtime.batch.leaves import Leaf, as_leaf, is_single
from pypipe.runtime.batch.opaque import tensor_within
from pypipe.runtime.batch.structure import CannotRebuild, Node, Path, open_node, path_text

__all__ = ["Rebuild", "flatten"]

Rebuild = Callable[[list[Any]], Any]
"""Makes a tree of the pieces of its leaves."""


def flatten(tree: Any, spec: Any, name: str) -> tuple[list[Leaf], Rebuild]:
    """Returns a tree's leaves, and a function that makes a tree like it of their pieces.

    Args:
        tree: of any nesting.
        spec: chunk specs of the same nesting, or a prefix of it, or None.
        name: the tree's name in error messages.

    Raises:
        InputError: a spec does not fit, or an object holds tensors and cannot be cut.
    """
    # The first forward waits for this, so what most batches are, a tensor or a tuple of tensors, has a short cut.
    root: Path = (name,)
    if tree is None:
        return [Leaf(None, root)], _only
    if type(tree) is tuple and spec is None and all(isinstance(value, Tensor) for value in tree):
        return [as_leaf(value, None, (root, "[", i), own=False) for i, value in enumerate(tree)], tuple
    leaves: list[Leaf] = []
    rebuild, _ = _walk(tree, spec, root, leaves, own=True)
    return leaves, rebuild


def _walk(value: Any, spec: Any, path: Path, leaves: list[Leaf], *, own: bool) -> tuple[Rebuild, int]:
    """Appends the leaves; returns what rebuilds the value of its pieces, and how many leaves it has."""
    node = None if is_single(value) else open_node(value)
    if node is None:
        if not is_chunk_spec(spec):
            raise _does_not_fit(spec, value, path)
        leaves.append(as_leaf(value, spec, path, own=own))
        return _only, 1
    if node.extras and not is_replicate(spec):
        place = tensor_within(node.extras)
        if place is not None:
            raise InputError(
                f"{path_text(path)} is a {type(value).__name__} with attributes of its own, of which one holds a "
                f"tensor ({place}): it cannot be cut into microbatches. Pass the tensor as an item, or give the whole "
                "Replicate() in its chunk spec"
            )
    start = len(leaves)
    parts: list[tuple[Rebuild, int]] = []
    one = is_chunk_spec(spec)
    specs = [spec] * len(node.values) if one else _parts(spec, value, node, path)
    for key, its_value, its_spec in zip(node.keys, node.values, specs, strict=True):
        parts.append(_walk(its_value, its_spec, (path, node.separator, key), leaves, own=not one))
    mine = leaves[start:]
    if not any(_changes(leaf) for leaf in mine):
        given = {leaf.given for leaf in mine} or {is_replicate(spec)}
        if len(given) < 2 or not node.plain:
            # The very object, for a stage may fill it. (Where some of its values are given by Replicate() and others
            # are not, the latter are still to be looked at.)
            leaves[start:] = [Leaf(value, path, given=given == {True})]
            return _only, 1
    return _rebuilder(node, parts, path), sum(count for _, count in parts)


def _changes(leaf: Leaf) -> bool:
    """Whether a container must be made anew for each microbatch because of this leaf."""
    return leaf.dim is not None or leaf.follows or (isinstance(leaf.value, Tensor) and leaf.value.requires_grad)


def _parts(spec: Any, value: Any, node: Node, path: Path) -> list[Any]:
    """The chunk spec of each value of a container."""
    named = node.separator == "." or isinstance(value, dict)
    if named and isinstance(spec, dict):
        unknown = [key for key in spec if key not in node.keys]
        if unknown:
            where = path_text((path, node.separator, unknown[0]))
            raise InputError(f"there is a chunk spec for {where}, but no such argument was given")
        return [spec.get(key) for key in node.keys]
    if isinstance(value, (tuple, list)) and isinstance(spec, (tuple, list)):
        if len(spec) != len(node.values):
            raise InputError(f"there are {len(spec)} chunk specs for {path_text(path)}, which has {len(value)} values")
        return list(spec)
    if named and type(spec) is type(value):
        return [getattr(spec, key, None) for key in node.keys]
    raise _does_not_fit(spec, value, path)


def _does_not_fit(spec: Any, value: Any, path: Path) -> InputError:
    return InputError(
        f"the chunk spec {spec!r} does not fit {path_text(path)}, a {type(value).__name__}: use TensorChunkSpec(dim), "
        "Replicate() or None, nested as it is"
    )


def _only(values: list[Any]) -> Any:
    (value,) = values
    return value


def _rebuilder(node: Node, parts: Sequence[tuple[Rebuild, int]], path: Path) -> Rebuild:
    if all(rebuild is _only for rebuild, _ in parts):
        make = node.rebuild
    else:

        def make(leaves: list[Any]) -> Any:
            values, start = [], 0
            for rebuild, count in parts:
                values.append(rebuild(leaves[start : start + count]))
                start += count
            return node.rebuild(values)

    if node.plain:
        return make

    def made(leaves: list[Any]) -> Any:
        try:
            return make(leaves)
        except CannotRebuild as error:
            raise InputError(
                f"{path_text(path)} is cut into microbatches, but {error}, or give it Replicate() in its chunk spec"
            ) from error

    return made
