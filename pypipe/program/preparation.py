"""Preparation: from any program to one that is proven and ready to run."""

from __future__ import annotations

from pypipe.program.lowering import lower
from pypipe.program.programs import Program
from pypipe.program.verification.proof import Verified, verify


def prepare(program: Program, *, synchronous: bool = False) -> Verified:
    """Lower a program that has no transfers, and verify it; one with transfers is verified as it is.

    Args:
        program: with or without transfers.
        synchronous: whether a transfer may block both of its ranks until it is over, as on GPUs: see `lower`. A program
            with transfers must have been lowered for it.

    Returns:
        The program with its transfers, and what the proof found: see `verify`. `count_slots` turns its `slots` into the
        number of buffers to make.

    Raises:
        ProgramError: the program is faulty; the message names rank, position and action.
    """
    lowered = program if program.has_transfers else lower(program, synchronous=synchronous)
    return verify(lowered, synchronous=synchronous)
