"""The catalog: every registered schedule, built for given numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from pypipe.program.builders.registered import builder_names, find_builder
from pypipe.program.programs import Program

PER_RANK = "stages_per_rank"
"""The builders' name for v."""


def catalog(
    n_ranks: int, n_microbatches: int, stages_per_rank: int | None = None, *, without: tuple[str, ...] = ("auto",)
) -> Iterator[tuple[str, Program | str]]:
    """Build each registered schedule.

    Args:
        n_ranks: P.
        n_microbatches: M.
        stages_per_rank: v, for the builders that have this option; their own default where None is given.
        without: names to leave out.

    Yields:
        The name, and its program; or, where it cannot be built for these numbers, the reason in one line.
    """
    for name in builder_names():
        if name in without:
            continue
        builder = find_builder(name)
        options = {}
        if stages_per_rank is not None and PER_RANK in inspect.signature(builder).parameters:
            options[PER_RANK] = stages_per_rank
        try:
            inspect.signature(builder).bind(n_ranks, n_microbatches, **options)
        except TypeError as error:
            yield name, f"its builder needs more than P and M: {error}"
            continue
        try:
            yield name, builder(n_ranks, n_microbatches, **options)
        except ValueError as error:
            yield name, str(error)
