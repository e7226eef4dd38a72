"""Finds and copies the memory of tensors, including those that wrap others, and results that are still on their way."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pypipe.runtime.torch_private import storage_key, without_modes

__all__ = ["copy_of", "memory_parts", "overlapping", "placeholder", "settled"]


def memory_parts(tensor: Tensor) -> Sequence[Tensor]:
    """The plain, strided tensors in whose memory a tensor's values lie; none for another layout."""
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return (tensor,) if tensor.layout is torch.strided else ()
    names, _ = tensor.__tensor_flatten__()
    held = [getattr(tensor, name) for name in names]  # a DTensor's mesh is among them
    return [part for each in held if isinstance(each, Tensor) for part in memory_parts(each)]


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The numbers of those tensors that have an element of memory in common with another one of them."""
    by_storage: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_storage.setdefault(storage_key(tensor), []).append(number)
    if len(by_storage) == len(tensors):
        return ()
    found: set[int] = set()
    for numbers in by_storage.values():
        for i, j in itertools.combinations(numbers, 2):
            if _overlap(*_extent(tensors[i]), *_extent(tensors[j])):
                found |= {i, j}
    return tuple(sorted(found))


_Extent = tuple[int, tuple[int, ...], tuple[int, ...]]


def _extent(tensor: Tensor) -> _Extent:
    """Where its elements begin in its storage, its shape and its strides, in elements; in bytes for views of others."""
    # (a dimension that is expanded takes the memory of one element)
    pairs = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size]
    width = tensor.element_size()
    shape = (*(size for size, _ in pairs), width)
    strides = (*(stride * width for _, stride in pairs), 1)
    return int(tensor.storage_offset()) * width, shape, strides


@functools.lru_cache(maxsize=1024)
def _overlap(
    begin: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    other_begin: int,
    other_shape: tuple[int, ...],
    other_strides: tuple[int, ...],
) -> bool:
    """Whether two extents within one storage have a byte in common."""
    if 0 in shape or 0 in other_shape:
        return False

    def end(begin: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
        return begin + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))

    first, last = min(begin, other_begin), max(end(begin, shape, strides), end(other_begin, other_shape, other_strides))
    if max(begin, other_begin) >= min(end(begin, shape, strides), end(other_begin, other_shape, other_strides)):
        return False
    with torch.inference_mode(False), without_modes():
        taken = torch.zeros(last - first, dtype=torch.bool, device="cpu")
        taken.as_strided(shape, strides, begin - first).fill_(True)
        return bool(taken.as_strided(other_shape, other_strides, other_begin - first).any())


def copy_of(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, without a graph.

    Of a DTensor its local part is copied: to clone one that is a partial sum is a collective, in which the other ranks
    of its mesh need not take part, since memory is each rank's own affair.
    """
    tensor = settled(tensor.detach())
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return _clone(tensor)
    kind: Any = type(tensor)
    names, rest = tensor.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}
    copied = {name: copy_of(each) if isinstance(each, Tensor) else each for name, each in held.items()}
    made: Tensor = kind.__tensor_unflatten__(copied, rest, tensor.shape, tensor.stride())
    return made.detach()


def _clone(tensor: Tensor) -> Tensor:
    if tensor.dtype in _NO_CLONE:  # its elements as they lie in memory, as bytes
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).clone().view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())
    return tensor.clone()


# torch has these types, and few operations on them.
_NO_CLONE = {
    getattr(torch, f"{kind}{bits}")
    for kind in ("int", "uint")
    for bits in range(1, 8)
    if hasattr(torch, f"{kind}{bits}")
}


def settled(tensor: Tensor) -> Tensor:
    """A tensor without a collective that is still on its way: it is waited for. Otherwise the tensor itself."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is None or not isinstance(tensor, collectives.AsyncCollectiveTensor):
        return tensor
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        waited: Tensor = tensor.trigger_wait()
        return waited
    made: Any = _Settled
    result: Tensor = made.apply(tensor)
    return result


class _Settled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, tensor: Any) -> Tensor:
        waited: Tensor = tensor.trigger_wait()
        return waited.detach()  # an object of its own, since this one gets a graph

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


@functools.lru_cache(maxsize=256)
def placeholder(_kind: type[Tensor], dtype: torch.dtype, device: torch.device, shape: torch.Size) -> Tensor:
    """A tensor of this shape on the memory of one element, neither read nor written; for each kind of tensor.

    It takes the place of a leaf's values, where the leaf is there for its gradient: what keeps the graph, and so the
    leaf, keeps no memory. To autograd a gradient fits it as it fits a contiguous tensor.
    """
    return torch.empty((), dtype=dtype, device=device).expand(shape)
