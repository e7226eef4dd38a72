"""Candidates: fixed schedules and found ones for one set of stages, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pypipe.program.errors import ProgramError
from pypipe.program.memory import peak_memory
from pypipe.program.preparation import prepare
from pypipe.program.programs import Program
from pypipe.program.search.preferences import search
from pypipe.program.search.setting import make_setting
from pypipe.program.simulation.clocks import run
from pypipe.program.simulation.costs import Costs

N_ACTIONS = 2_000_000
"""The actions that a search lists in all: a few seconds' work."""

_SAME = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class Candidate:
    """A program within a memory cap, and its figures.

    Args:
        program: compute actions only.
        step_time: the end of its last action.
        span: the longest time from a rank's first start to its last end.
        is_fixed: whether a schedule with a name of its own made it.
    """

    program: Program
    step_time: float
    span: float
    is_fixed: bool


@dataclass(frozen=True, slots=True)
class Stages:
    """What candidates are made for.

    Args:
        shape: a program; only its placement, chains and numbers are looked at.
        costs: of its stages.
        activation: for each stage, what one microbatch's activations take.
        memory: for each rank, the most that they may take.
        busy_links: whether a link carries one message at a time.
    """

    shape: Program
    costs: Costs
    activation: Sequence[float]
    memory: Sequence[float]
    busy_links: bool = False


def candidates(stages: Stages, fixed: Iterable[Program], n_actions: int = N_ACTIONS) -> list[Candidate]:
    """The fixed programs that fit into memory, and the best that a search finds.

    Args:
        stages: the stages; each rank's memory holds one microbatch of each of its stages.
        fixed: programs with the same placement and chains, each of which `verify` accepts once it is lowered.
        n_actions: how much to search; 0 for not at all.
    """
    fitting = [
        program
        for program in fixed
        if all(
            peak <= most * (1 + 1e-9)
            for peak, most in zip(peak_memory(program, stages.activation), stages.memory, strict=True)
        )
    ]
    if not n_actions:
        return [_rated(stages, program, True) for program in fitting]
    setting = make_setting(stages.shape, stages.costs, stages.activation, stages.memory)
    found = search(setting, n_actions, [setting.lists(program) for program in fitting])
    programs = [setting.program("auto", scheduled.lists) for scheduled in found]
    return [_rated(stages, p, True) for p in fitting] + [_rated(stages, p, False) for p in programs]


def choose(among: Sequence[Candidate]) -> Candidate | None:
    """The best candidate that the verifier accepts; None where there is none.

    Best is the least sum of step time (which counts where steps are apart) and span (where they overlap), among those
    that are no worse than any fixed one in step time and, where there are such, in span.
    """
    fixed = [candidate for candidate in among if candidate.is_fixed]
    if fixed:
        step_time = min(candidate.step_time for candidate in fixed) * _SAME
        span = min(candidate.span for candidate in fixed) * _SAME
        among = [candidate for candidate in among if candidate.step_time <= step_time]
        among = [candidate for candidate in among if candidate.span <= span] or among
    for candidate in sorted(among, key=lambda each: (each.step_time + each.span, not each.is_fixed)):
        try:
            prepare(candidate.program)
        except ProgramError:
            continue
        return candidate
    return None


def _rated(stages: Stages, program: Program, is_fixed: bool) -> Candidate:
    times = run(program, stages.costs, stages.busy_links)
    ranks = [(begun[0], ended[-1]) for begun, ended in zip(times.starts, times.ends, strict=True) if begun]
    step_time = max((end for _, end in ranks), default=0.0)
    span = max((end - start for start, end in ranks), default=0.0)
    return Candidate(program, step_time, span, is_fixed)
