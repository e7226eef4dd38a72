"""Runs autograd's engine, and makes what a graph begins with and what a backward starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pypipe.runtime.torch_private import FunctionBase, engine, is_any_autocast_enabled, unsafe_view

__all__ = ["enter", "gradient_edge", "run_backward"]


def run_backward(
    roots: Sequence[Any],
    gradients: Sequence[Tensor],
    *,
    ends: Sequence[Any] = (),
    keep_graph: bool = False,
    like: Tensor | None = None,
) -> None:
    """Backward from tensors or gradient edges; gradients add up in the leaves' `.grad`.

    Args:
        roots: what backward starts from, with one gradient each.
        ends: edges; only what leads to them is computed. If none, all that the roots lead to.
        keep_graph: whether nodes keep what they saved.
        like: where backward operations run; by default the first gradient.
    """
    arguments = (tuple(roots), tuple(gradients), keep_graph, False, tuple(ends))  # no create_graph
    if not is_any_autocast_enabled():
        engine.run_backward(*arguments, allow_unreachable=True, accumulate_grad=True)
        return
    # Backward operations run in the dtypes of the forward, as for loss.backward() after the autocast region.
    with torch.autocast((gradients[0] if like is None else like).device.type, enabled=False):
        engine.run_backward(*arguments, allow_unreachable=True, accumulate_grad=True)


def enter(tensor: Tensor) -> Tensor:
    """Returns an intermediate result on the same memory: it has its own node and version, and is no view to autograd.

    So a stage may change its input in place, even a leaf or a piece of a batch, and no other piece is affected.
    """
    inside: Tensor = unsafe_view(tensor, tensor.shape)
    return inside


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Returns the edge that a tensor's gradient takes. It keeps the graph alive, but none of the tensor's memory."""
    node = tensor.grad_fn
    if node is not None and not isinstance(node, FunctionBase):
        return GradientEdge(node, tensor.output_nr)  # as torch's own function does, in half the time
    if node is None:
        return get_gradient_edge(tensor)
    # The Python object of a custom Function's node does not keep the C++ node alive; a node that leads to it does.
    # Here, too, torch's own function takes twice the time.
    if torch.is_grad_enabled():
        owner = tensor.view_as(tensor).grad_fn
    else:
        with torch.enable_grad():
            owner = tensor.view_as(tensor).grad_fn
    if _has_owner:
        return GradientEdge(node, tensor.output_nr, owner)
    owned = _OwnedEdge(node, tensor.output_nr)
    owned.owner = owner
    return owned


_has_owner = "ownership_token" in GradientEdge._fields


class _OwnedEdge(GradientEdge):  # torch < 2.7
    owner: Any
