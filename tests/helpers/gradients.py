"""Gradients that have to be there."""

from __future__ import annotations

from torch import Tensor


def grad(leaf: Tensor) -> Tensor:
    """The gradient of a leaf that has one."""
    assert leaf.grad is not None
    return leaf.grad
