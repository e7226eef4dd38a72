"""Running autograd's engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["as_recorded", "gradient_edge", "run_backward"]

# torch.autograd.backward() spends more time on checking its arguments in Python than a small stage's backward takes;
# the engine checks shapes and dtypes itself. Others that know their roots call it as well, so it is unlikely to go.
_engine: Any = torch.autograd.Variable._execution_engine


def run_backward(
    roots: Sequence[Any], gradients: Sequence[Tensor], *, ends: Sequence[Any] = (), keep_graph: bool = False
) -> None:
    """Backward from tensors or gradient edges; gradients add up in the leaves' `.grad`.

    Args:
        roots: what backward starts from, with one gradient each.
        ends: edges; only what leads to them is computed. If none, all that the roots lead to.
        keep_graph: whether nodes keep what they saved.
    """
    arguments = (tuple(roots), tuple(gradients), keep_graph, False, tuple(ends))  # no create_graph
    with as_recorded(gradients[0].device.type):
        _engine.run_backward(*arguments, allow_unreachable=True, accumulate_grad=True)


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Where a tensor's gradient goes. Unlike the tensor, it keeps none of its memory; it does keep the graph below."""
    node = tensor.grad_fn
    if node is not None and not isinstance(node, torch._C._FunctionBase):
        return GradientEdge(node, tensor.output_nr)  # what torch's own function makes, in half its time
    if node is None:
        return get_gradient_edge(tensor)
    # The Python half of a custom Function's node does not keep its other half; a node that leads to it does. Here, too,
    # torch's own function takes twice the time.
    with _grad_is_on if torch.is_grad_enabled() else torch.enable_grad():
        owner = tensor.view_as(tensor).grad_fn
    if _has_owner:
        return GradientEdge(node, tensor.output_nr, owner)
    owned = _OwnedEdge(node, tensor.output_nr)
    owned.owner = owner
    return owned


_grad_is_on: AbstractContextManager[Any] = nullcontext()
_has_owner = "ownership_token" in GradientEdge._fields


class _OwnedEdge(GradientEdge):  # torch < 2.7
    owner: Any


def as_recorded(device: str) -> AbstractContextManager[Any]:
    """Backward operations run in the dtypes of the forward, as for loss.backward() after the autocast region."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _as_is


_as_is: AbstractContextManager[Any] = nullcontext()
