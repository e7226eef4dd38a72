"""Memory: how many activations a program keeps alive at once."""

from __future__ import annotations

from collections.abc import Sequence

from pypipe.errors import ConfigurationError
from pypipe.program.actions import Kind
from pypipe.program.programs import Program


def peak_memory(program: Program, activation: float | Sequence[float] = 1) -> tuple[float, ...]:
    """Compute, for each rank, the most memory that its live activations take at any time.

    A stage's activations of one microbatch live from the start of its F to the end of its B, or of its W where
    the backward is split (of the F in a program without backwards).

    Args:
        program: with or without transfers.
        activation: what one microbatch's activations take: one number, or one for each stage, in any unit. The
            default counts pairs of stage and microbatch, as `Verified.peak_activations` does.

    Raises:
        ConfigurationError: a sequence with another length than the number of stages.
    """
    sizes = list(activation) if isinstance(activation, Sequence) else [activation] * program.n_stages
    if len(sizes) != program.n_stages:
        raise ConfigurationError(f"activation has {len(sizes)} entries for {program.n_stages} stages: give one a stage")
    is_forward_only = all(
        action.kind is Kind.F or not action.kind.is_compute for actions in program.ranks for action in actions
    )
    peaks: list[float] = []
    for actions in program.ranks:
        alive: float = 0
        peak: float = 0
        for action in actions:
            kind = action.kind
            if kind is Kind.F:
                alive += sizes[action.stage]
                if alive > peak:
                    peak = alive
                if is_forward_only:
                    alive -= sizes[action.stage]
            elif kind is Kind.B or kind is Kind.W:
                alive -= sizes[action.stage]
        peaks.append(peak)
    return tuple(peaks)
