"""Whether the replicas of a stage within one pipeline (DualPipe has two) begin with the same parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pypipe.errors import ConfigurationError

__all__ = ["compare_parameters", "describe_parameters"]


def describe_parameters(*modules: nn.Module) -> list[Any]:
    """What must be the same of two copies before the first step, as JSON values: which parameters, and their sums."""
    parameters = [pair for module in modules for pair in module.named_parameters()]
    named = [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters]
    total = size = 0.0
    for _, parameter in parameters:
        values = parameter.detach()
        values = (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).double()
        total += float(values.sum())
        size += float(values.abs().sum())
    return [hashlib.sha256(repr(named).encode()).hexdigest(), total, size]


def compare_parameters(described: Sequence[tuple[int, int, list[Any]]]) -> None:
    """Compares all (rank, piece, describe_parameters()) of a pipeline.

    Raises:
        ConfigurationError: two copies of a piece are not the same.
    """
    first: dict[int, tuple[int, list[Any]]] = {}
    for rank, piece, (names, total, size) in described:
        other, (their_names, their_total, their_size) = first.setdefault(piece, (rank, [names, total, size]))
        if names != their_names:
            raise ConfigurationError(
                f"the two copies of stage {piece}, on ranks {other} and {rank}, have different parameters: build both "
                "from the same module, with the same ones frozen"
            )
        if abs(total - their_total) + abs(size - their_size) > 1e-6 * (size + their_size):
            raise ConfigurationError(
                f"the two copies of stage {piece}, on ranks {other} and {rank}, begin with different values of their "
                "parameters: load the same state_dict() into both, or build both from the same random seed"
            )
