"""Divides what is known of each rank, such as the time of its forward, among the stages of a program."""

from __future__ import annotations

from collections.abc import Sequence

from pypipe.program.programs import Program

__all__ = ["by_stage"]


def by_stage(program: Program, values: Sequence[float]) -> list[float]:
    """Divide the values of ranks among a program's stages.

    Args:
        program: each of its chains is one copy of the model.
        values: a rank's whole share of the model: one number for every rank, or P in the order of the model's layers.

    Returns:
        One number for each stage, chain by chain.
    """
    shares: list[float] = []
    for chain in program.chains:
        length = len(chain.stages)
        for piece in range(length):
            # A stage reaches from piece / length to (piece + 1) / length of the model's depth.
            value = values[0] if len(values) == 1 else values[piece * program.n_ranks // length]
            shares.append(value * program.n_ranks / length)
    return shares
