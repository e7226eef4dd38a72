"""What runs on the ranks: scripts for torch.distributed.pipelining, with pypipe under its names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import swap_runs
import swap_scripts
import torch
import torch.distributed.pipelining
from swap_models import CPU, WIDTH, Layer, Scaled, data, gradients_of, module_of
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.nn import functional

import pypipe
from pypipe import compat

SINGLE = ["GPipe", "1F1B"]
LOOPED = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
IN_A_V = ["ZBVZeroBubble", "DualPipeV"]
NAMES = [*SINGLE, *LOOPED, *IN_A_V]
ROWS = [2, 1, 3, 2]
"""Of each microbatch."""


@contextmanager
def installed_for_sure() -> Iterator[None]:
    with compat.installed():
        assert issubclass(torch.distributed.pipelining.PipelineStage, pypipe.PipelineStage)
        yield


def run_both(rank: int, size: int, group: Any, script: str, *arguments: Any) -> list[str]:
    """Runs a script with torch's classes and, under the same names, with pypipe's; says what differs."""
    lib = torch.distributed.pipelining
    function = swap_scripts.SCRIPTS.get(script) or getattr(swap_runs, script)
    theirs = function(lib, rank, size, group, *arguments)
    with installed_for_sure():
        mine = function(lib, rank, size, group, *arguments)
    found: list[str] = []
    if mine.keys() != theirs.keys():
        found.append(f"{sorted(mine)} instead of {sorted(theirs)}")
    for key in theirs:
        swap_runs._compare(f"rank {rank}: {key}", mine.get(key), theirs[key], found)
    return found


def pieces_of(rank: int, size: int, name: str) -> list[int]:
    """The stages of this rank."""
    if name in SINGLE:
        return [rank]
    return [rank, 2 * size - 1 - rank if name in IN_A_V else rank + size]


def modules_of(pieces: list[int]) -> list[nn.Module]:
    return [module_of(Scaled, piece) for piece in pieces]


def schedule_of(rank: int, size: int, group: Any, name: str, modules: list[nn.Module], **options: Any) -> Any:
    """As a trainer builds one."""
    lib = torch.distributed.pipelining
    pieces = pieces_of(rank, size, name)
    total = size if name in SINGLE else 2 * size
    stages = [
        lib.PipelineStage(module, piece, total, CPU, group=group) for module, piece in zip(modules, pieces, strict=True)
    ]
    cls = schedules.get_schedule_class(name)
    arguments = {"n_microbatches": len(ROWS), "loss_fn": functional.mse_loss, **options}
    return (
        cls(stages[0], **arguments) if issubclass(cls, schedules.PipelineScheduleSingle) else cls(stages, **arguments)
    )


def microbatches(first: bool, last: bool) -> tuple[Any, Any, Any]:
    """Of unequal lengths; each stage takes a keyword argument."""
    arguments = [(data(number, rows, WIDTH),) for number, rows in enumerate(ROWS)]
    options = [{"scale": data(20 + number, rows, 1)} for number, rows in enumerate(ROWS)]
    targets = [data(10 + number, rows, WIDTH) for number, rows in enumerate(ROWS)]
    return arguments if first else None, options, targets if last else None


def whole(total: int, scale_grads: bool) -> tuple[list[Tensor], Tensor, list[list[Tensor]]]:
    """Losses, joined outputs and gradients by piece, without a pipeline."""
    modules = modules_of(list(range(total)))
    arguments, options, targets = microbatches(True, True)
    losses, outputs = [], []
    for (x,), more, target in zip(arguments, options, targets, strict=True):
        for module in modules:
            x = module(x, **more)
        loss = functional.mse_loss(x, target)
        (loss * len(target) / sum(ROWS) if scale_grads else loss).backward()
        losses.append(loss.detach())
        outputs.append(x.detach())
    return losses, torch.cat(outputs), [gradients_of(module) for module in modules]


def given_microbatches(rank: int, size: int, group: Any, name: str, scale_grads: bool) -> None:
    """step() and eval() of microbatches that are cut already."""
    with installed_for_sure():
        pieces = pieces_of(rank, size, name)
        total = size if name in SINGLE else 2 * size
        losses, outputs, gradients = whole(total, scale_grads)
        modules = modules_of(pieces)
        schedule = schedule_of(rank, size, group, name, modules, scale_grads=scale_grads)
        arguments, options, targets = microbatches(0 in pieces, total - 1 in pieces)
        given = {"arg_mbs": arguments, "kwarg_mbs": options, "target_mbs": targets}
        for call in (schedule.step, schedule.eval, schedule.step):
            for module in modules:
                module.zero_grad()
            mine: list[Tensor] | None = [] if targets else None
            output = call(**given, losses=mine)
            if mine is not None:
                torch.testing.assert_close(torch.stack(mine), torch.stack(losses), rtol=1e-12, atol=1e-14)
                torch.testing.assert_close(output, outputs, rtol=1e-12, atol=1e-14)
            for piece, module in zip(pieces, modules, strict=True):
                expected = [] if call == schedule.eval else gradients[piece]
                torch.testing.assert_close(gradients_of(module), expected, rtol=1e-12, atol=1e-14)
            assert not any(module._forward_pre_hooks for module in modules)


def loaded_csv(rank: int, size: int, group: Any, name: str, format: str, folder: str) -> None:
    """torch's own schedule, dumped by torch and loaded by the runtime that pypipe puts in its place."""
    path = os.path.join(folder, f"{name}-{format}-{rank}.csv")
    pieces = pieces_of(rank, size, name)
    theirs = schedule_of(rank, size, group, name, modules_of(pieces))
    assert type(theirs).__module__ == "torch.distributed.pipelining.schedules"
    if format != "table":
        theirs._dump_csv(path, format)
    with installed_for_sure():
        lib = torch.distributed.pipelining
        losses, _, gradients = whole(2 * size, scale_grads=False)
        modules = modules_of(pieces)
        stages = [
            lib.PipelineStage(module, piece, 2 * size, CPU, group=group)
            for module, piece in zip(modules, pieces, strict=True)
        ]
        runtime = schedules._PipelineScheduleRuntime(
            stages, n_microbatches=len(ROWS), loss_fn=functional.mse_loss, scale_grads=False
        )
        if format == "table":
            runtime._prepare_schedule_with_comms(theirs.pipeline_order)
        else:
            runtime._load_csv(path, format=format)  # type: ignore[arg-type]
        has_last = 2 * size - 1 in pieces
        arguments, options, targets = microbatches(0 in pieces, has_last)
        mine: list[Tensor] | None = [] if has_last else None
        runtime._step_microbatches(arguments, options, targets, mine)
        if mine is not None:
            torch.testing.assert_close(torch.stack(mine), torch.stack(losses), rtol=1e-12, atol=1e-14)
        for piece, module in zip(pieces, modules, strict=True):
            torch.testing.assert_close(gradients_of(module), gradients[piece], rtol=1e-12, atol=1e-14)
        assert runtime.stage_index_to_group_rank == theirs.stage_index_to_group_rank


def bad_microbatches(rank: int, size: int, group: Any, kind: str, culprit: int) -> str:
    """One rank's microbatches are wrong; what this rank hears."""
    with installed_for_sure():
        schedule = schedule_of(rank, size, group, "1F1B", modules_of([rank]), timeout=20.0)
        arguments, options, targets = microbatches(rank == 0, rank == size - 1)
        given: dict[str, Any] = {"arg_mbs": arguments, "kwarg_mbs": options, "target_mbs": targets}
        if rank == culprit:
            if kind == "length":
                given["kwarg_mbs"] = options[1:]
            elif kind == "type":
                given["kwarg_mbs"] = (each for each in options)
            elif kind == "both":
                given["scale"] = options[0]["scale"]
            elif kind == "no target":
                given["target_mbs"] = None
        try:
            schedule.step(**given)
        except pypipe.PipelineError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


def bad_csv(rank: int, size: int, group: Any, text: str, folder: str) -> str:
    """One rank's file is wrong; what this rank hears."""
    path = os.path.join(folder, f"program-{rank}.csv")
    with open(path, "w") as file:
        file.write(text if rank == 1 else "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    with installed_for_sure():
        lib = torch.distributed.pipelining
        stage = lib.PipelineStage(module_of(Layer, rank), rank, size, CPU, group=group)
        runtime = schedules._PipelineScheduleRuntime([stage], 4, loss_fn=functional.mse_loss)
        try:
            runtime._load_csv(path)
            runtime.step(data(0, 8, WIDTH), target=data(1, 8, WIDTH))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"
