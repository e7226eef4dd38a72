"""Opens containers, one level of a tree at a time, and rebuilds them with other values.

Containers are tuples, lists, dicts, sets and what is derived from them, NamedTuples, dataclasses, and every class that
torch's pytree knows. Nothing is registered with pytree: that would change what other libraries see.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pypipe.errors import InputError
from pypipe.runtime.torch_private import pytree

__all__ = [
    "CannotRebuild",
    "Node",
    "Path",
    "attributes",
    "class_text",
    "has_tensors",
    "map_tensors",
    "open_node",
    "path_keys",
    "path_text",
]

Path = tuple[Any, ...]
"""(path of the parent, "[" for an item or "." for an attribute, key); the root is a tuple of one name."""

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


class Node:
    """One container.

    Attributes:
        separator: "[" where keys are those of items, "." where they are names of attributes.
        keys: of the values, in order.
        values: what is in it.
        rebuild: makes a container like it of as many values, in the same order.
        shape: what two containers must have alike to be joined.
        plain: whether a copy is always as good as the container itself; else one is made only where values change.
        extras: attributes that the container has beside its values.
    """

    __slots__ = ("extras", "keys", "plain", "rebuild", "separator", "shape", "values")

    def __init__(
        self,
        keys: Sequence[Any],
        values: list[Any],
        rebuild: Callable[[list[Any]], Any],
        shape: Any,
        *,
        separator: str = "[",
        plain: bool = True,
        extras: dict[str, Any] | None = None,
    ) -> None:
        self.keys = keys
        self.values = values
        self.rebuild = rebuild
        self.shape = shape
        self.separator = separator
        self.plain = plain
        self.extras = extras


def open_node(value: Any) -> Node | None:
    """The container that `value` is, or None where it is a single value.

    A dataclass object is copied with all its attributes, fields or not, and without `__post_init__`: that may change
    values, which it has done once. What functools.cached_property has kept is left out, and is computed again.
    """
    kind = type(value)
    if kind in _SCALARS or isinstance(value, Tensor):
        return None
    if kind is tuple or kind is list:
        return Node(range(len(value)), list(value), kind, (kind, len(value)))
    if kind is dict:
        keys = list(value)
        return Node(keys, list(value.values()), lambda values: dict(zip(keys, values, strict=True)), (kind, *keys))
    values, structure = pytree.tree_flatten(value, is_leaf=lambda child: child is not value)
    if not (len(values) == 1 and values[0] is value):
        return _known_to_pytree(value, values, structure)
    if isinstance(value, torch.nn.Module):
        return None
    if isinstance(value, dict):
        keys = list(value)
        extras = {name: its_value for name, its_value in attributes(value).items() if name not in value}
        make = functools.partial(_dict_like, value, extras)
        return Node(keys, list(value.values()), make, (kind, *keys), plain=False, extras=extras)
    if isinstance(value, (list, tuple, set, frozenset)):
        extras = attributes(value)
        make = functools.partial(_list_like, value, extras)
        return Node(range(len(value)), list(value), make, (kind, len(value)), plain=False, extras=extras)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value)
    return None


def _known_to_pytree(value: Any, values: list[Any], structure: Any) -> Node:
    fields = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and isinstance(fields, tuple) and len(fields) == len(values):
        return Node(fields, values, structure.unflatten, structure, separator=".")
    named = isinstance(value, dict) and len(value) == len(values)
    return Node(list(value) if named else range(len(values)), values, structure.unflatten, structure)


def attributes(value: Any) -> dict[str, Any]:
    """An object's own attributes: those in its `__dict__` and in its slots."""
    found: dict[str, Any] = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):  # as the class body spells a private name
                name = f"_{kind.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


class CannotRebuild(InputError):
    """A container of a class of its own cannot be rebuilt with other values."""

    def __init__(self, kind: type, reason: str) -> None:
        super().__init__(
            f"a {kind.__name__} cannot be made again of other tensors ({reason}): use a plain dict, tuple or dataclass"
        )


def _dataclass(value: Any) -> Node:
    kind = type(value)
    found = {
        name: its_value
        for name, its_value in attributes(value).items()
        if not isinstance(getattr(kind, name, None), functools.cached_property)
    }
    names = list(found)

    def rebuild(values: list[Any]) -> Any:
        try:
            made = object.__new__(kind)
        except TypeError as error:
            raise CannotRebuild(kind, str(error)) from error
        for name, its_value in zip(names, values, strict=True):
            object.__setattr__(made, name, its_value)  # frozen ones too
        return made

    return Node(names, list(found.values()), rebuild, (kind, *names), separator=".", plain=False)


def _dict_like(value: dict[Any, Any], extras: dict[str, Any], values: list[Any]) -> Any:
    kind = type(value)
    items = dict(zip(value, values, strict=True))
    made = _called(kind, items)
    right = type(made) is kind and list(made) == list(items) and all(made[key] is items[key] for key in items)
    # Some show their items as attributes too, which must not be those of the whole.
    shown = [name for name in attributes(value) if name in items]
    found = attributes(made) if shown else {}
    return _completed(kind, made, extras, right and all(found.get(name) is items[name] for name in shown))


def _list_like(value: Any, extras: dict[str, Any], values: list[Any]) -> Any:
    kind = type(value)
    made = _called(kind, values)
    right = type(made) is kind and len(made) == len(values)
    if isinstance(value, (list, tuple)):
        right = right and all(a is b for a, b in zip(made, values, strict=True))
    return _completed(kind, made, extras, right)


def _called(kind: type, values: Any) -> Any:
    try:
        return kind(values)
    except Exception as error:
        raise CannotRebuild(kind, f"{kind.__name__}(...) raised {type(error).__name__}: {error}") from error


def _completed(kind: type, made: Any, extras: dict[str, Any], right: bool) -> Any:
    if not right:
        raise CannotRebuild(kind, f"{kind.__name__}(...) makes something else of the values that it is given")
    for name, value in extras.items():
        object.__setattr__(made, name, value)
    return made


def class_text(value: Any) -> str:
    """The name of its class, as messages have it."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def path_text(path: Path) -> str:
    """`args[0]['meta'].offsets`."""
    parts: list[str] = []
    while len(path) == 3:
        path, separator, key = path
        parts.append(f"[{key!r}]" if separator == "[" else f".{key}")
    name: str = path[0]
    return name + "".join(reversed(parts))


def path_keys(path: Path) -> list[Any]:
    """The keys of a path, from the root on."""
    keys: list[Any] = []
    while len(path) == 3:
        path, _, key = path
        keys.append(key)
    return keys[::-1]


def has_tensors(tree: Any) -> bool:
    """Whether there is a tensor in it."""
    if isinstance(tree, Tensor):
        return True
    node = open_node(tree)
    return node is not None and any(has_tensors(value) for value in node.values)


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Of a stage's output, a tree like it with `function(tensor)` in each tensor's place.

    Containers without tensors are themselves.

    Raises:
        InputError: a container with tensors cannot be made again.
    """
    try:
        return _mapped(tree, function)[0]
    except CannotRebuild as error:
        raise InputError(f"the stage's output: {error}") from error


def _mapped(tree: Any, function: Callable[[Tensor], Any]) -> tuple[Any, bool]:
    if isinstance(tree, Tensor):
        return function(tree), True
    node = open_node(tree)
    if node is None:
        return tree, False
    made = [_mapped(value, function) for value in node.values]
    if not any(changed for _, changed in made):
        return tree, False
    return node.rebuild([value for value, _ in made]), True
