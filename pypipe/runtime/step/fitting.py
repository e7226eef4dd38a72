"""From what a trainer asks for to programs that are verified and fit the ranks and the stages that there are."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from pypipe.program import (
    Channel,
    Kind,
    Program,
    ProgramError,
    Verified,
    add_stage_actions,
    build,
    count_slots,
    find_builder,
    load_csv,
    prepare,
    verify,
)
from pypipe.program.builders.registry import PER_RANK

__all__ = ["Fitted", "fit"]


@dataclass(frozen=True)
class Fitted:
    """What step() and eval() run, or why there is nothing to run.

    Args:
        training: with backwards; None where there is no loss.
        forward_only: for eval().
        mismatch: how num_stages does not fit the number of ranks; then there are no programs. Only all ranks together
            can tell which of them is wrong, so it is an error when they compare their configs.
        synchronous: whether transfers may block both of their ranks, as on GPUs: see `pypipe.program.lower`.
    """

    training: Verified | None = None
    forward_only: Verified | None = None
    mismatch: str | None = None
    synchronous: bool = False

    @property
    def slots(self) -> dict[Channel, int]:
        """For each channel of the programs, how many slots it gets; of none where there are no programs."""
        return count_slots(self.programs)

    @property
    def programs(self) -> list[Verified]:
        """Those that there are."""
        return [verified for verified in (self.forward_only, self.training) if verified is not None]

    def with_stage_actions(self, *, reduced: Collection[int], sharded: Collection[int]) -> Fitted:
        """The same programs, with what stages do once a step together with their replicas.

        Args:
            reduced: the stages whose gradients are reduced.
            sharded: the stages whose parameters are sharded.
        """

        def extended(verified: Verified | None) -> Verified | None:
            if verified is None:
                return None
            program = add_stage_actions(verified.program, reduced=reduced, sharded=sharded)
            if program is verified.program:
                return verified
            return verify(program, synchronous=self.synchronous)

        return replace(self, training=extended(self.training), forward_only=extended(self.forward_only))

    def made_synchronous(self) -> Fitted:
        """The same programs for synchronous transfers. Transfers that would block for ever are placed anew."""

        def placed(verified: Verified | None) -> Verified | None:
            if verified is None:
                return None
            try:
                return verify(verified.program, synchronous=True)
            except ProgramError:
                return prepare(verified.program.without_transfers(), synchronous=True)

        return replace(self, training=placed(self.training), forward_only=placed(self.forward_only), synchronous=True)


def fit(
    wanted: Program | str | os.PathLike[str],
    n_ranks: int,
    num_stages: int,
    n_microbatches: int,
    options: dict[str, Any],
    *,
    training: bool,
) -> Fitted:
    """Builds, lowers and verifies.

    Args:
        wanted: a program, with or without transfers; or a CSV file of one (a path, or a name that ends in .csv); or
            the name of a registered builder.
        n_ranks: P.
        num_stages: S, the pieces that the model is cut into.
        n_microbatches: M.
        options: what else the builder takes. The number of stages on each rank follows from S and P.
        training: whether there is a loss.

    Raises:
        ValueError: M, a name or an option cannot work; a ProgramError, which is one, where the program is faulty.
    """
    if isinstance(wanted, os.PathLike) or (isinstance(wanted, str) and wanted.endswith(".csv")):
        try:
            wanted = load_csv(wanted)
        except OSError as error:
            raise ValueError(f"a program cannot be read: {error}") from error
    if isinstance(wanted, Program):
        if options:
            raise ValueError(f"{', '.join(options)}: options are for builders, and this program is built already")
        program = wanted
    elif not isinstance(wanted, str):
        raise ValueError(f"a {type(wanted).__name__} is not a program: give a Program, a builder's name or a CSV file")
    else:
        built = _build(wanted, n_ranks, num_stages, n_microbatches, options)
        if isinstance(built, str):
            return Fitted(mismatch=built)
        program = built
    if program.n_microbatches != n_microbatches:
        raise ValueError(
            f"n_microbatches is {n_microbatches}, but the program {program.name} has {program.n_microbatches}: give "
            "both the same number"
        )
    if program.n_ranks != n_ranks:
        raise ValueError(
            f"the pipeline's group has {n_ranks} ranks, but the program {program.name} has {program.n_ranks}: build it "
            "for as many ranks, or give PipelineStage another group"
        )
    mismatch = _mismatch(program, num_stages)
    if mismatch:
        return Fitted(mismatch=mismatch)
    forward_only = prepare(program.compute_only().forward_only())
    if not training:
        return Fitted(None, forward_only)
    if not any(action.kind in (Kind.B, Kind.I) for actions in program.ranks for action in actions):
        raise ValueError(f"the program {program.name} has no backward, but there is a loss_fn: leave that out")
    return Fitted(prepare(program), forward_only)


def _build(name: str, n_ranks: int, num_stages: int, n_microbatches: int, options: dict[str, Any]) -> Program | str:
    """The program, or a mismatch."""
    parameters = inspect.signature(find_builder(name)).parameters
    if PER_RANK in parameters and PER_RANK not in options:
        if num_stages % n_ranks:
            return (
                f"num_stages is {num_stages}, but the pipeline's group has {n_ranks} ranks: {name} runs as many stages "
                f"on each rank as on any other; cut the model into a multiple of {n_ranks} stages"
            )
        options = {**options, PER_RANK: num_stages // n_ranks}
    try:
        inspect.signature(find_builder(name)).bind(n_ranks, n_microbatches, **options)
    except TypeError as error:
        known = ", ".join(list(parameters)[2:]) or "no options"
        raise ValueError(f"the schedule {name}: {error}; it takes {known}") from None
    return build(name, n_ranks, n_microbatches, **options)


def _mismatch(program: Program, num_stages: int) -> str | None:
    if len(program.chains) > 2:
        raise ValueError(f"{program.name} has {len(program.chains)} chains of stages: at most 2 can be run")
    n_ranks, length = program.n_ranks, len(program.chains[0].stages)
    if any(len(chain.stages) != length for chain in program.chains):
        lengths = " and ".join(str(len(chain.stages)) for chain in program.chains)
        raise ValueError(f"the chains of {program.name} have {lengths} stages: copies of one model have as many")
    if length == num_stages:
        return None
    remedy = f"has {length} stages on them; cut the model into {length} stages"
    if length == n_ranks:
        remedy = "runs one stage on each rank; give PipelineStage a group of as many ranks as there are stages"
    where = f"num_stages is {num_stages}, but the pipeline's group has {n_ranks} ranks"
    return f"{where}: the schedule {program.name} {remedy}"
