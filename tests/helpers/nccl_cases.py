"""Training over the NCCL link, on the emulated driver and NCCL; CPU tensors are the device's memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transparency
from models import make
from torch import nn

import pypipe

sys.path.insert(0, str(Path(__file__).parents[1] / "emulator"))

import cuda_emulator

_controls: dict[str, Any] = {}


def control(folder: str) -> Any:
    """The emulator's control functions; the libraries are built already."""
    if folder not in _controls:
        _controls[folder] = cuda_emulator.Control(cuda_emulator.build())
    return _controls[folder]


def _hazards(emulator: Any, rank: int) -> list[str]:
    count = emulator.hazards()
    return [f"rank {rank}: {count} hazards, the last: {emulator.last_report()}"] if count else []


def seeds(rank: int, size: int, group: Any, cases: list[tuple[int, str, str, int, int]], **knobs: Any) -> list[str]:
    """For each (seed, schedule, model, M, rows): the comparison with the unpipelined model, and what was reported."""
    emulator = control("")
    found: list[str] = []
    for seed, *case in cases:
        emulator.reset_counters()
        emulator.set("seed", seed * 64 + rank)
        found += [f"seed {seed}: {text}" for text in transparency.compare(rank, size, group, *case, True)]  # type: ignore[arg-type]
        found += [f"seed {seed}: {text}" for text in _hazards(emulator, rank)]
        if found:
            break
    return found


def steady_state(
    rank: int, size: int, group: Any
) -> tuple[int, int, dict[Any, dict[str, int]], dict[Any, dict[str, int]]]:
    """Host synchronizations and device allocations during three steps after the first, and counters around them."""
    emulator = control("")
    modules, batch, loss = make("mlp", size)
    stage = pypipe.PipelineStage(modules[rank], rank, size, torch.device("cpu"), group=group)
    schedule = pypipe.Schedule1F1B(stage, n_microbatches=6, loss_fn=loss, timeout=30)
    x, y = batch(12)
    schedule.step(x, target=y)
    schedule.step(x, target=y)
    before = {str(channel): counted for channel, counted in schedule.counters.items()}
    emulator.reset_counters()
    for _ in range(3):
        schedule.step(x, target=y)
    counts = emulator.host_synchronizations(), emulator.allocations()
    after = {str(channel): counted for channel, counted in schedule.counters.items()}
    schedule.close()
    return *counts, before, after


def dies(rank: int, size: int, group: Any, what: str) -> str:
    """A fault on rank 1 in the middle of a step; returns what this rank raised."""
    emulator = control("")
    stage = pypipe.PipelineStage(nn.Linear(4, 4).double(), rank, size, torch.device("cpu"), group=group)
    schedule = pypipe.Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss, timeout=5)
    x = torch.randn(8, 4, dtype=torch.float64)
    schedule.step(x, target=x)
    if rank == 1:
        emulator.fault(f"{what}@{emulator.operations() + 3}")
    try:
        for _ in range(3):
            schedule.step(x, target=x)
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        emulator.fault("")
        schedule.close()
        emulator.reset_counters()
    return "nothing was raised"
