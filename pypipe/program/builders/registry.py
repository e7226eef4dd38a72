"""The registry of builders: a schedule's name, and the function that makes its program."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from pypipe.errors import ConfigurationError
from pypipe.program.builders.spelling import did_you_mean, spelled
from pypipe.program.programs import Program

Builder = Callable[..., Program]

PER_RANK = "stages_per_rank"
"""What builders call v, the number of stages on each rank, where it can be chosen."""

_builders: dict[str, Builder] = {}


def register(name: str) -> Callable[[Builder], Builder]:
    """Make a builder known to `build` by a name; used as a decorator.

    The builder is called with P and M, then its options, and gets numbers of 1 or more only.

    Args:
        name: the name, such as "gpipe".

    Raises:
        ConfigurationError: the name is taken by another builder.
    """

    def decorate(builder: Builder) -> Builder:
        if name in _builders:
            raise ConfigurationError(f"the schedule name {name!r} is taken: register this builder under another one")

        @functools.wraps(builder)
        def checked(n_ranks: int, n_microbatches: int, *args: Any, **options: Any) -> Program:
            require_numbers(n_ranks, n_microbatches, options.get(PER_RANK, 1))
            return builder(n_ranks, n_microbatches, *args, **options)

        _builders[name] = checked
        return checked

    return decorate


def builder_names() -> tuple[str, ...]:
    """List the names that `build` knows, in the order of registration."""
    return tuple(_builders)


def find_builder(name: str) -> Builder:
    """Find the builder of a registered schedule, whose parameters after P and M are its options.

    Args:
        name: one of `builder_names()`, in any spelling: "zbv", "ZB-V", "ScheduleZBVZeroBubble".

    Raises:
        ConfigurationError: the name is unknown.
    """
    return _builders[registered_name(name)]


def registered_name(name: str) -> str:
    """Find the registered name that another spelling means.

    Raises:
        ConfigurationError: the name is unknown.
    """
    found = spelled(name, _builders)
    if found is None:
        known = ", ".join(_builders)
        raise ConfigurationError(f"no schedule is called {name!r}{did_you_mean(name, _builders)}; known are {known}")
    return found


def build(name: str, /, n_ranks: int, n_microbatches: int, **options: Any) -> Program:
    """Build the program of a registered schedule.

    Args:
        name: one of `builder_names()`, in any spelling.
        n_ranks: P.
        n_microbatches: M.
        options: what else the builder takes, by its own names, such as `stages_per_rank`.

    Returns:
        The program, compute actions only: `lower` inserts the transfers.

    Raises:
        ConfigurationError: the name is unknown, the builder has no such option, or it refuses the numbers.
    """
    name = registered_name(name)
    builder = _builders[name]
    _require_options(name, builder, options)
    program = builder(n_ranks, n_microbatches, **options)
    if not isinstance(program, Program):
        raise ConfigurationError(f"the builder of {name} returned a {type(program).__name__}: return a Program")
    return program


def build_all(
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
    for name, builder in list(_builders.items()):
        if name in without:
            continue
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


def _require_options(name: str, builder: Builder, options: dict[str, Any]) -> None:
    parameters = list(inspect.signature(builder).parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters[2:]]
    for option in options:
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ConfigurationError(f"the schedule {name} has no option {option!r}: {takes}")


def require_count(what: str, count: int, remedy: str) -> None:
    """Refuse anything but a whole number of 1 or more.

    Args:
        what: what is counted, such as "rank".
        count: the number.
        remedy: what to give instead.

    Raises:
        ConfigurationError: the number is below 1, or not a whole number.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigurationError(f"{what} or more, not {count}: give {remedy}")


def require_numbers(n_ranks: int, n_microbatches: int, stages_per_rank: int = 1) -> None:
    """Refuse numbers that no schedule can be built from.

    Args:
        n_ranks: P.
        n_microbatches: M.
        stages_per_rank: v.

    Raises:
        ConfigurationError: one of them is below 1, or not a whole number.
    """
    require_count("a pipeline needs 1 rank", n_ranks, "the group's number of processes")
    require_count("a step needs 1 microbatch", n_microbatches, "the number of slices that each batch is cut into")
    require_count("a rank holds 1 stage", stages_per_rank, "stages_per_rank as the number of stages on each rank")
