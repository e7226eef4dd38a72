"""Ranks that do not build and start the same pipelines, and what becomes of those that they build later."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
import transparency
from torch import nn

import pypipe


def _schedule(rank: int, size: int, group: Any, timeout: float, n_microbatches: int = 2) -> Any:
    stage = pypipe.PipelineStage(nn.Linear(3, 3), rank, size, torch.device("cpu"), group=group)
    return pypipe.Schedule1F1B(stage, n_microbatches, loss_fn=nn.functional.mse_loss, timeout=timeout)


def _start(rank: int, size: int, group: Any, timeout: float, n_microbatches: int = 2) -> str:
    x = torch.ones(4, 3)
    try:
        schedule = _schedule(rank, size, group, timeout, n_microbatches)
        schedule.step(x, target=x)
        schedule.close()
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _train(rank: int, size: int, group: Any) -> list[str]:
    return transparency.compare(rank, size, group, "Schedule1F1B", "mlp", 2, 5, True)


def one_never_starts(rank: int, size: int, group: Any, absent: int) -> tuple[str, list[str]]:
    """One rank builds a schedule and never calls step(); the others wait, and give up."""
    if rank == absent:
        _schedule(rank, size, group, 30)
        said = ""
    else:
        said = _start(rank, size, group, 0.3)
    dist.barrier(group)
    return said, _train(rank, size, group)


def deadlines_differ(rank: int, size: int, group: Any) -> tuple[list[str], list[str]]:
    """Rank 0 gives up twice; rank 1 waits on, at the rendezvous that rank 0 left; the last rank comes late."""
    said = []
    if rank == 0:
        said = [_start(rank, size, group, 0.3), _start(rank, size, group, 0.3)]
        dist.send(torch.zeros(1), size - 1, group)
    elif rank == size - 1:
        dist.recv(torch.zeros(1), 0, group)
    return said, _train(rank, size, group)


def one_cannot_build(rank: int, size: int, group: Any) -> tuple[str, str, list[str]]:
    """Rank 0 cannot build its schedule, and the others do not start theirs: they hear of it at their next start.

    Rank 0 then waits alone, until it gives up.
    """
    first = ""
    if rank == 0:
        first = _start(rank, size, group, 30, n_microbatches=0)
    else:
        _schedule(rank, size, group, 30)
    second = _start(rank, size, group, 0.3)
    dist.barrier(group)
    return first, second, _train(rank, size, group)


def one_dies_first(rank: int, size: int, group: Any, dying: int, how: str) -> str:
    """One rank's process ends when its stage or its schedule is built, and the others wait for it."""
    if rank == dying and how == "killed without a schedule":
        pypipe.PipelineStage(torch.nn.Linear(3, 3), rank, size, torch.device("cpu"), group=group)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == dying:
        schedule = _schedule(rank, size, group, 30)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        schedule.close()
        os._exit(0)
    return _start(rank, size, group, 100)


def eval_and_step(
    rank: int, size: int, group: Any, evaluating: int, n_microbatches: int
) -> tuple[list[str], list[str]]:
    """One rank calls eval() where the others call step(); then all step."""
    x = torch.ones(6, 3)
    schedule = _schedule(rank, size, group, 60, n_microbatches)
    said = []
    for turn in range(3):
        call = schedule.eval if rank == evaluating and turn == 1 else schedule.step
        try:
            call(x, target=x)
        except pypipe.PipelineError as error:
            said.append(str(error))
            break
    schedule.close()
    dist.barrier(group)
    return said, _train(rank, size, group)


def two_threads(rank: int, size: int, group: Any) -> list[str]:
    """A step is called in a thread while another one runs."""
    said = []
    inside, done = threading.Event(), threading.Event()

    class Stage(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            done.wait(60)
            return super().forward(x)

    stage = pypipe.PipelineStage(Stage(3, 3), rank, size, torch.device("cpu"), group=group)
    schedule = pypipe.Schedule1F1B(stage, 1, loss_fn=nn.functional.mse_loss, timeout=60)
    x = torch.ones(4, 3)
    first = threading.Thread(target=schedule.step, args=(x,), kwargs={"target": x})
    first.start()
    inside.wait(60)
    try:
        schedule.step(x, target=x)
    except pypipe.PipelineError as error:
        said.append(str(error))
    done.set()
    first.join()
    schedule.step(x, target=x)
    schedule.close()
    return said


def one_leaves_its_block(rank: int, size: int, group: Any, leaving: int, error: type[BaseException]) -> Any:
    """An exception of its own takes one rank out of the schedule's `with` block, between two steps."""
    x = torch.ones(4, 3)
    said = ""
    try:
        with _schedule(rank, size, group, 60) as schedule:
            for turn in range(3):
                if rank == leaving and turn == 1:
                    raise error("the data are gone")
                schedule.step(x, target=x)
    except (pypipe.PipelineError, error) as caught:
        said = f"{type(caught).__name__}: {caught}"
    dist.barrier(group)
    return said, _train(rank, size, group)
