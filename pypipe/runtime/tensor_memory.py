"""Where a tensor's values lie, and copies of them; for tensors that wrap others, and for results on their way too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["copy_of", "memory_parts", "settled"]


def memory_parts(tensor: Tensor) -> Sequence[Tensor]:
    """The plain, strided tensors in whose memory a tensor's values lie; none for another layout."""
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return (tensor,) if tensor.layout is torch.strided else ()
    names, _ = tensor.__tensor_flatten__()
    held = [getattr(tensor, name) for name in names]  # a DTensor's mesh is among them
    return [part for each in held if isinstance(each, Tensor) for part in memory_parts(each)]


def copy_of(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, without a graph.

    Of a DTensor its local part is copied: to clone one that is a partial sum is a collective, in which the other ranks
    of its mesh need not take part, since memory is each rank's own affair.
    """
    tensor = settled(tensor.detach())
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return tensor.clone()
    kind: Any = type(tensor)
    names, rest = tensor.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}
    copied = {name: copy_of(each) if isinstance(each, Tensor) else each for name, each in held.items()}
    made: Tensor = kind.__tensor_unflatten__(copied, rest, tensor.shape, tensor.stride())
    return made.detach()


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
