"""Runs a script with torch's classes and with pypipe's, and compares; more scripts: a file's text, several stages."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed.pipelining
from swap_models import (
    CPU,
    ROWS,
    WIDTH,
    Layer,
    M,
    Results,
    Scaled,
    data,
    gradients_of,
    module_of,
)
from swap_scripts import SCRIPTS
from torch import Tensor
from torch.nn import functional

import pypipe

# The script of torch's own tutorial, in the form in which people have it in their files.
TEXT = """
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

def train(rank, world_size, group, module, x, y):
    device = torch.device("cpu")
    stage = PipelineStage(module, rank, world_size, device, group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=torch.nn.MSELoss())
    losses = []
    if rank == 0:
        schedule.step(x)
    elif rank == world_size - 1:
        output = schedule.step(target=y, losses=losses)
        losses.append(output)
    else:
        schedule.step()
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.MSELoss(), scale_grads=False)
    if rank == 0:
        schedule.step(x)
    elif rank == world_size - 1:
        output = schedule.step(target=y, losses=losses)
        losses.append(output)
    else:
        schedule.step()
    return losses
"""


def text_with_its_import_swapped(lib: ModuleType, rank: int, size: int, group: Any) -> Results:
    """The text, with nothing but the module's name replaced."""
    space: dict[str, Any] = {}
    exec(TEXT.replace("torch.distributed.pipelining", lib.__name__), space)
    module = module_of(Layer, rank)
    losses = space["train"](rank, size, group, module, data(1, ROWS, WIDTH), data(2, ROWS, WIDTH))
    return {"losses": losses, "gradients": gradients_of(module)}


MULTI = [
    *("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"),
    *("ScheduleZBVZeroBubble", "ScheduleDualPipeV"),
]


def several_stages(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """Two stages on each rank; a keyword argument goes to both of a rank's."""
    is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    pieces = [rank, 2 * size - 1 - rank if is_v else rank + size]
    modules = [module_of(Scaled, piece) for piece in pieces]
    stages = [
        lib.PipelineStage(module, piece, 2 * size, CPU, group=group)
        for module, piece in zip(modules, pieces, strict=True)
    ]
    schedule = getattr(lib, name)(stages, M, loss_fn=functional.mse_loss, scale_grads=True)
    optimizer = torch.optim.Adam([p for module in modules for p in module.parameters()], lr=0.01)
    found: Results = {}
    for number in range(2):
        losses: list[Tensor] = []
        args = (data(number, ROWS, WIDTH),) if any(stage.is_first for stage in stages) else ()
        has_last = any(stage.is_last for stage in stages)
        more = {"target": data(10 + number, ROWS, WIDTH), "losses": losses} if has_last else {}
        output = schedule.step(*args, **more, scale=data(20 + rank, ROWS, WIDTH))
        found[f"output {number}"] = output if has_last else None
        found[f"losses {number}"] = torch.stack(losses) if has_last else None
        found[f"gradients {number}"] = [gradients_of(module) for module in modules]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {', '.join(map(_shape, value)) or 'nothing'}"
    return repr(value)


def _compare(path: str, mine: Any, theirs: Any, found: list[str]) -> None:
    if isinstance(theirs, Tensor) and isinstance(mine, Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            found.append(f"{path}: {tuple(mine.shape)} {mine.dtype} instead of {tuple(theirs.shape)} {theirs.dtype}")
            return
        worst = float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-300)) if mine.numel() else 0.0
        if not worst <= 1e-12:
            found.append(f"{path} differs by {worst:g}")
    elif isinstance(theirs, (list, tuple)) and isinstance(mine, (list, tuple)) and len(mine) == len(theirs):
        for i, pair in enumerate(zip(mine, theirs, strict=True)):
            _compare(f"{path}[{i}]", *pair, found)
    elif mine is not None or theirs is not None:
        found.append(f"{path}: {_shape(mine)} instead of {_shape(theirs)}")


def run_both(rank: int, size: int, group: Any, script: str, *arguments: Any) -> list[str]:
    """Runs a script with torch's classes and with pypipe's, and says what differs."""
    function = SCRIPTS.get(script) or globals()[script]
    theirs = function(torch.distributed.pipelining, rank, size, group, *arguments)
    mine = function(pypipe, rank, size, group, *arguments)
    found: list[str] = []
    if mine.keys() != theirs.keys():
        found.append(f"{sorted(mine)} instead of {sorted(theirs)}")
    for key in theirs:
        _compare(f"rank {rank}: {key}", mine.get(key), theirs[key], found)
    if rank == size - 1 and "losses" in theirs and script != "no_outputs" and not theirs["losses"]:
        found.append("the script computed nothing")
    return found
