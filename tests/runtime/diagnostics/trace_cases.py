"""What ranks do in the tests of traces."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from models import make
from torch import nn

import pypipe
from pypipe.program import Action, Program, Timeline
from pypipe.runtime.step import pipeline

CPU = torch.device("cpu")
TIMEOUT = 30.0


class Pipe:
    """A small pipeline, one stage a rank, and batches for it."""

    def __init__(self, rank: int, size: int, group: Any, schedule: str, n_microbatches: int, **options: Any) -> None:
        modules, self._make_batch, loss_fn = make("mlp", size, seed=3)
        stage = pypipe.PipelineStage(modules[rank], rank, size, CPU, group=group)
        self.schedule = getattr(pypipe, schedule)(stage, n_microbatches, loss_fn, **({"timeout": TIMEOUT} | options))
        self.batch = self._make_batch(6)

    def step(self) -> None:
        x, y = self.batch
        self.schedule.step(x, target=y)

    def eval(self) -> None:
        self.schedule.eval(self.batch[0])


def plain(timeline: Timeline) -> list[list[tuple[str, float, float]]]:
    """A timeline in a form that travels between processes."""
    return [[(str(action), start, end) for action, start, end in events] for events in timeline.ranks]


def traced(rank: int, size: int, group: Any, schedule: str, n_microbatches: int) -> dict[str, Any]:
    """Traces a step, an eval and a step, after a step that is not traced."""
    pipe = Pipe(rank, size, group, schedule, n_microbatches)
    with pipe.schedule:
        pipe.step()
        with pipe.schedule.trace() as trace:
            pipe.step()
            pipe.eval()
            pipe.step()
        pipe.step()
        bubble = trace.bubble
        return {
            "timelines": [plain(timeline) for timeline in trace.timelines],
            "name": trace.timeline.program.name,
            "ratio": trace.timeline.bubble_ratio,
            "parts": (bubble.warm_up_and_cool_down, bubble.imbalance, bubble.exposed_transfer),
        }


class StrictClock:
    """In place of an accelerator's: the host's clock, which minds the order in which it is told."""

    def __init__(self) -> None:
        self.spans: list[list[int]] = []
        self.is_open = False

    def begin(self) -> None:
        assert not self.is_open
        self.is_open = True
        self.spans.append([time.monotonic_ns()])

    def ready(self) -> None:
        assert self.is_open
        self.spans[-1][0] = time.monotonic_ns()

    def end(self) -> None:
        assert self.is_open
        self.is_open = False
        self.spans[-1].append(time.monotonic_ns())

    def times(self, actions: Sequence[Action]) -> dict[Action, tuple[int, int]]:
        assert not self.is_open
        return {action: (start, end) for action, (start, end) in zip(actions, self.spans, strict=True)}


def timed_by_a_device(rank: int, size: int, group: Any) -> list[list[tuple[str, float, float]]]:
    """Traces a step as on a device with a clock of its own, after which a step without it runs as ever."""
    pipe = Pipe(rank, size, group, "Schedule1F1B", 4)
    clocks: list[StrictClock] = []

    def strict_clock(_: torch.device) -> StrictClock:
        clocks.append(StrictClock())
        return clocks[-1]

    with patch.object(pipeline, "clock_for", strict_clock), pipe.schedule, pipe.schedule.trace() as trace:
        pipe.step()
    assert clocks
    return plain(trace.timeline)


def saved(rank: int, size: int, group: Any, folder: Path) -> list[str]:
    """Saves a trace in every form on rank 0, and says what a wrong ending is told."""
    pipe = Pipe(rank, size, group, "Schedule1F1B", 3)
    with pipe.schedule:
        with pipe.schedule.trace() as trace:
            pipe.step()
        if rank:
            return []
        for ending in ("json", "html", "svg"):
            trace.save(folder / f"step.{ending}")
        try:
            trace.save(folder / "step.png")
        except pypipe.InputError as error:
            return [str(error), trace.text(80), json.dumps(plain(trace.timeline))]
    return []


def said(action: Any) -> str:
    """What an action is refused with."""
    try:
        action()
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(rank: int, size: int, group: Any) -> dict[str, str]:
    """Everything that is refused without another rank's doing."""
    pipe = Pipe(rank, size, group, "ScheduleGPipe", 2)
    found = {}
    with pipe.schedule:
        with pipe.schedule.trace() as trace:
            found["inside"] = said(lambda: trace.timeline)
            found["twice"] = said(pipe.schedule.trace().__enter__)
            pipe.step()
        found["again"] = said(trace.__enter__)
        with pipe.schedule.trace() as empty:
            pass
        found["empty"] = said(lambda: empty.timelines)
        with pipe.schedule.trace():  # the refused ones have left nothing behind
            pipe.step()
    return found


def left_alone(rank: int, size: int, group: Any) -> str:
    """Rank 0 traces, and nobody else does."""
    pipe = Pipe(rank, size, group, "ScheduleGPipe", 2, timeout=2.0)
    with pipe.schedule:
        trace = pipe.schedule.trace()
        if rank:
            pipe.step()
            return ""
        with trace:
            pipe.step()
        return said(lambda: trace.timeline)


def out_of_step(rank: int, size: int, group: Any) -> str:
    """Rank 1 traces two steps where the others trace one."""
    pipe = Pipe(rank, size, group, "ScheduleGPipe", 2)
    with pipe.schedule:
        if rank != 1:
            pipe.step()
        with pipe.schedule.trace() as trace:
            if rank == 1:
                pipe.step()
            pipe.step()
        return said(lambda: trace.timelines)


class Failing(nn.Module):
    """Fails once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("told to")
        return x * self.weight


def failed(rank: int, size: int, group: Any) -> tuple[str, str]:
    """A stage fails within a trace: the error is the step's, and the trace has nothing to show."""
    module = Failing()
    stage = pypipe.PipelineStage(module, rank, size, CPU, group=group)
    schedule = pypipe.ScheduleGPipe(stage, 2, nn.functional.mse_loss, timeout=TIMEOUT)
    with schedule:
        schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        module.fails = rank == 1
        trace = schedule.trace()
        error = ""
        try:
            with trace:
                schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        except (ValueError, pypipe.PipelineError) as raised:
            error = type(raised).__name__
        return error, said(lambda: trace.timelines)


def several_stages(
    rank: int, size: int, group: Any, program: Program
) -> tuple[list[list[tuple[str, float, float]]], list[int]]:
    """Traces a program with several stages a rank; its timeline, and the live activations that it shows."""
    pieces = len(program.chains[0].stages)
    modules, make_batch, loss_fn = make("mlp", pieces, seed=3)
    held = [program.piece_of(stage) for stage, holder in enumerate(program.placement) if holder == rank]
    stages = [
        # Of two copies of the model, a rank holds a piece of either.
        pypipe.PipelineStage(copy.deepcopy(modules[piece]), piece, pieces, CPU, group=group)
        for piece in held
    ]
    x, y = make_batch(8)
    with pypipe.Schedule(program, stages, program.n_microbatches, loss_fn, timeout=TIMEOUT) as schedule:
        with schedule.trace() as trace:
            schedule.step(x, target=y)
        return plain(trace.timeline), list(trace.timeline.peak_activations)
