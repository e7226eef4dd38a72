"""Builders: functions that make the programs of known schedules, and the registry of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .actions import Action, Kind
from .programs import Program

Builder = Callable[..., Program]

_builders: dict[str, Builder] = {}


def register(name: str) -> Callable[[Builder], Builder]:
    """Make a builder known to `build` by a name; used as a decorator.

    Args:
        name: the name, such as "gpipe".

    Raises:
        ValueError: the name is taken by another builder.
    """

    def decorate(builder: Builder) -> Builder:
        if name in _builders:
            raise ValueError(f"the schedule name {name!r} is taken: register this builder under another one")
        _builders[name] = builder
        return builder

    return decorate


def builder_names() -> tuple[str, ...]:
    """The names that `build` knows, in the order of registration."""
    return tuple(_builders)


def find_builder(name: str) -> Builder:
    """The builder of a registered schedule, whose parameters after P and M are its options.

    Raises:
        ValueError: the name is unknown.
    """
    builder = _builders.get(name)
    if builder is None:
        raise ValueError(f"no schedule is called {name!r}; known are {', '.join(builder_names())}")
    return builder


def build(name: str, /, n_ranks: int, n_microbatches: int, **options: Any) -> Program:
    """Build the program of a registered schedule.

    Args:
        name: one of `builder_names()`.
        n_ranks: P.
        n_microbatches: M.
        options: what else the builder takes, by its own names.

    Returns:
        The program, compute actions only: `lower` inserts the transfers.

    Raises:
        ValueError: the name is unknown, or the builder refuses the numbers.
    """
    return find_builder(name)(n_ranks, n_microbatches, **options)


@register("gpipe")
def gpipe(n_ranks: int, n_microbatches: int) -> Program:
    """GPipe: every forward, then every backward in reverse order of microbatches.

    Source: Huang et al., "GPipe", arXiv 1811.06965, section 2.2 and figure 2c.

    Args:
        n_ranks: P; rank r holds stage r.
        n_microbatches: M.

    Raises:
        ValueError: P or M is below 1.
    """
    _require_positive(n_ranks, n_microbatches)
    microbatches = range(n_microbatches)
    return Program(
        name="gpipe",
        n_microbatches=n_microbatches,
        placement=tuple(range(n_ranks)),
        ranks=tuple(
            (
                *(Action(stage, Kind.F, microbatch) for microbatch in microbatches),
                *(Action(stage, Kind.B, microbatch) for microbatch in reversed(microbatches)),
            )
            for stage in range(n_ranks)
        ),
    )


@register("1f1b")
def one_f_one_b(n_ranks: int, n_microbatches: int) -> Program:
    """1F1B with a flush: warm-up forwards, then a forward and a backward in turn, then the other backwards.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", arXiv 2104.04473, section 2.2.1 (PipeDream-Flush). A rank warms up with
    min(M, P - 1 - rank) forwards, so M may be smaller than P.

    Args:
        n_ranks: P; rank r holds stage r.
        n_microbatches: M.

    Raises:
        ValueError: P or M is below 1.
    """
    _require_positive(n_ranks, n_microbatches)
    return Program(
        name="1f1b",
        n_microbatches=n_microbatches,
        placement=tuple(range(n_ranks)),
        ranks=tuple(
            _one_f_one_b_rank(stage, min(n_microbatches, n_ranks - 1 - stage), n_microbatches)
            for stage in range(n_ranks)
        ),
    )


def _one_f_one_b_rank(stage: int, n_warmup: int, n_microbatches: int) -> tuple[Action, ...]:
    actions = [Action(stage, Kind.F, microbatch) for microbatch in range(n_warmup)]
    for microbatch in range(n_microbatches - n_warmup):
        actions.append(Action(stage, Kind.F, n_warmup + microbatch))
        actions.append(Action(stage, Kind.B, microbatch))
    for microbatch in range(n_microbatches - n_warmup, n_microbatches):
        actions.append(Action(stage, Kind.B, microbatch))
    return tuple(actions)


def _require_positive(n_ranks: int, n_microbatches: int) -> None:
    if n_ranks < 1:
        raise ValueError(f"a pipeline needs 1 rank or more, not {n_ranks}: give the group's number of processes")
    if n_microbatches < 1:
        raise ValueError(
            f"a step needs 1 microbatch or more, not {n_microbatches}: "
            "give the number of slices that each batch is cut into"
        )
