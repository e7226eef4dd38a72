"""Looks for tensors in objects that cannot be cut: part of a batch must not go whole to every microbatch."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pypipe.runtime.batch.structure import attributes

__all__ = ["tensor_within"]

# What these hold belongs to the model or the machine, not to a batch.
_NO_BATCH: tuple[type, ...] = (torch.nn.Module, torch.optim.Optimizer, type, types.ModuleType, enum.Enum)
_SCALARS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)

_MOST = 1000  # values to look at: this is done in every step
_DEEP = 2  # objects within objects; what containers and functions hold does not count


def tensor_within(value: Any) -> str | None:
    """Finds the first tensor with a dimension in an object: its place, as `.cache.keys[0]`, or None.

    It looks into attributes, slots, containers, closures, partial functions and the objects of bound methods: two
    objects deep, nearest first, and at a thousand values at most.
    """
    seen = {id(value)}
    level: list[tuple[Any, str, int]] = [(value, "", 0)]
    looked_at = 0
    while level:
        following: list[tuple[Any, str, int]] = []
        for item, place, depth in level:
            for child, its_place, deeper in _children(item):
                looked_at += 1
                if looked_at > _MOST:
                    return None
                if isinstance(child, (*_SCALARS, *_NO_BATCH)) or id(child) in seen:
                    continue
                if isinstance(child, Tensor):
                    if child.dim() > 0 and not isinstance(child, torch.nn.Parameter):
                        return place + its_place
                    continue
                seen.add(id(child))
                if depth + deeper < _DEEP and not _is_mesh(child):
                    following.append((child, place + its_place, depth + deeper))
        level = following
    return None


def _is_mesh(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(value, getattr(module, "DeviceMesh", ()))


def _children(value: Any) -> Iterable[tuple[Any, str, int]]:
    """What is within, where, and whether that is an object deeper."""
    if isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            try:
                yield cell.cell_contents, f" (its variable {name})", 0
            except ValueError:  # not assigned yet
                continue
        for default in itertools.chain(value.__defaults__ or (), (value.__kwdefaults__ or {}).values()):
            yield default, " (a default of it)", 0
    elif isinstance(value, types.MethodType):
        yield value.__self__, ".__self__", 0
    elif isinstance(value, functools.partial):
        yield value.func, ".func", 0
        for i, argument in enumerate(value.args):
            yield argument, f".args[{i}]", 0
        for key, argument in value.keywords.items():
            yield argument, f".keywords[{key!r}]", 0
    elif isinstance(value, (dict, types.MappingProxyType)):
        for key, item in value.items():
            yield item, f"[{key!r}]", 0
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for i, item in enumerate(value):
            yield item, f"[{i}]", 0
    if isinstance(value, _NO_BATCH) or _is_mesh(value):
        return
    for name, item in attributes(value).items():
        yield item, f".{name}", 1
