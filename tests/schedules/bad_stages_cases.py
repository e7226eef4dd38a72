"""Ways in which the stages, or the program, of a schedule are wrong; and what every rank then sees."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import transparency
from models import Block
from torch import nn
from torch.nn import functional

import pypipe
from pypipe.program import Action, Chain, Kind, Program, build, lower

SIZE = 3


@dataclasses.dataclass
class Setup:
    """What one rank builds its schedule with. A case changes it on some ranks."""

    rank: int
    group: Any
    indices: list[int]
    count: int = 2 * SIZE
    schedule: Any = "ScheduleZBVZeroBubble"  # a class, or what pypipe.Schedule takes
    microbatches: int = 4
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    stages: Any = None  # instead of PipelineStages of the indices


def _swap(s: Setup) -> None:
    s.indices = {0: [1, 4], 1: [0, 5]}.get(s.rank, s.indices)


def _looped(s: Setup) -> None:
    s.indices = [s.rank, s.rank + SIZE]


def _twice(s: Setup) -> None:
    s.indices = [0, 4] if s.rank == 1 else s.indices


def _missing(s: Setup) -> None:
    s.indices = [1] if s.rank == 1 else s.indices


def _module(s: Setup) -> None:
    if s.rank == 1:
        s.stages = [pypipe.PipelineStage(Block(6), 1, s.count, group=s.group), nn.Linear(6, 6)]


def _too_few_pieces(s: Setup) -> None:
    s.count, s.indices = SIZE, [s.rank]


def _uneven(s: Setup) -> None:
    s.schedule, s.count, s.indices = "ScheduleInterleaved1F1B", 4, [s.rank]


def _two_for_one(s: Setup) -> None:
    s.schedule = "Schedule1F1B"


def _other_count(s: Setup) -> None:
    s.count = 8 if s.rank == 2 else s.count


def _odd_dualpipe(s: Setup) -> None:
    s.schedule, s.count, s.indices = "ScheduleDualPipe", SIZE, [s.rank, SIZE - 1 - s.rank]


def _unknown(s: Setup) -> None:
    s.schedule = ("zbw",)


def _unknown_option(s: Setup) -> None:
    s.schedule, s.options = ("zbv",), {"waves": 3}


def _other_program(s: Setup) -> None:
    s.schedule = (Program("mine", 4, (0, 1, 2, 2, 1, 0), build("zbv", SIZE, 4).ranks),)
    if s.rank == 1:
        s.schedule = (Program("mine", 4, (0, 1, 2, 2, 1, 0), build("v_min", SIZE, 4).ranks),)


def _other_number_of_microbatches(s: Setup) -> None:
    s.schedule = (build("zbv", SIZE, 5),)


def _other_number_of_ranks(s: Setup) -> None:
    s.schedule = (build("zbv", 2, 4),)


def _forwards_only(s: Setup) -> None:
    s.schedule = (build("zbv", SIZE, 4).forward_only(),)


def _deadlock(s: Setup) -> None:
    program = build("zbv", SIZE, 4)
    first = list(program.ranks[0])
    here = first.index(Action(0, Kind.F, 0))
    first.append(first.pop(here))
    s.schedule = (Program("mine", 4, program.placement, (tuple(first), *program.ranks[1:])),)


def _without_a_transfer(s: Setup) -> None:
    program = lower(build("zbv", SIZE, 4))
    cut = tuple(action for action in program.ranks[0] if str(action) != "0SEND_F2")
    s.schedule = (Program("mine", 4, program.placement, (cut, *program.ranks[1:])),)


def _three_chains(s: Setup) -> None:
    chains = tuple(Chain(range(2 * i, 2 * i + 2), range(i, i + 1)) for i in range(3))
    lists: list[list[Action]] = [[] for _ in range(SIZE)]
    for i in range(3):
        a, b = 2 * i, 2 * i + 1
        order = [Action(a, Kind.F, i), Action(b, Kind.F, i), Action(b, Kind.B, i), Action(a, Kind.B, i)]
        for action in order:
            lists[action.stage % SIZE].append(action)
    s.schedule = (Program("mine", 3, (0, 1, 2, 0, 1, 2), tuple(map(tuple, lists)), chains),)
    s.microbatches, s.count, s.indices = 3, 2, [s.rank % 2]


def _no_file(s: Setup) -> None:
    s.schedule = (Path("/nowhere/mine.csv"),)


def _no_program(s: Setup) -> None:
    s.schedule = (5,)


CASES = {
    name.lstrip("_"): function
    for name, function in list(globals().items())
    if name.startswith("_") and getattr(function, "__annotations__", {}).get("s") == "Setup"
}


def attempt(rank: int, size: int, group: Any, case: str) -> tuple[str, list[str]]:
    """What this rank raises, and what is wrong with a good schedule afterwards."""
    setup = Setup(rank, group, [rank, 2 * SIZE - 1 - rank])
    CASES[case](setup)
    raised = "nothing"
    schedule: Any = None
    try:
        stages = setup.stages
        if stages is None:
            stages = [pypipe.PipelineStage(Block(6), index, setup.count, group=group) for index in setup.indices]
        make: Any = pypipe.Schedule if isinstance(setup.schedule, tuple) else getattr(pypipe, setup.schedule)
        program = setup.schedule if isinstance(setup.schedule, tuple) else ()
        schedule = make(*program, stages, setup.microbatches, functional.mse_loss, timeout=20, **setup.options)
        schedule.step(torch.ones(8, 6), target=torch.ones(8, 6))
    except pypipe.PipelineError as error:
        raised = f"{type(error).__name__}: {error}"
    if schedule is not None:
        schedule.close()
    return raised, transparency.compare(rank, size, group, "ScheduleVMin", "mlp", 2, 5, True)
