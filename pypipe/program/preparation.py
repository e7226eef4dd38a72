"""Preparation: from any program to one that is proven and ready to run."""

from __future__ import annotations

from pypipe.program.lowering import lower
from pypipe.program.programs import Program
from pypipe.program.verification.proof import Verified, verify


def prepare(program: Program, *, single_communicator: bool = False) -> Verified:
    """Lower a program that has no transfers, and verify it; one with transfers is verified as it is.

    Args:
        program: with or without transfers.
        single_communicator: whether each pair of ranks has one communicator, instead of one for each link. A program
            with transfers must have been lowered for it.

    Returns:
        The program with its transfers, and what the proof found: see `verify`. `count_slots` turns its `slots` into the
        number of buffers to make.

    Raises:
        ProgramError: the program is faulty; the message names rank, position and action.
    """
    lowered = program if program.has_transfers else lower(program, single_communicator=single_communicator)
    return verify(lowered, single_communicator=single_communicator)
