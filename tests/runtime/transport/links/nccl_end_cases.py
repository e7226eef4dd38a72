"""How pipelines over the NCCL link end, with transfers under way that may never end."""

from __future__ import annotations

import gc
import signal
import threading
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from models import make, twins, unpipelined
from nccl_cases import compute_stream, control, hazards
from torch import nn
from torch.nn import functional
from transparency import TOLERANCE, difference

import pypipe
from pypipe.runtime.transport.links import nccl

CPU = torch.device("cpu")


def _schedule(rank: int, size: int, group: Any, timeout: float = 5.0) -> Any:
    stage = pypipe.PipelineStage(nn.Linear(4, 4).double(), rank, size, CPU, group=group)
    return pypipe.Schedule1F1B(stage, n_microbatches=4, loss_fn=functional.mse_loss, timeout=timeout)


def _batch() -> torch.Tensor:
    return torch.randn(8, 4, dtype=torch.float64)


def _raised(call: Any) -> str:
    try:
        call()
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def at_once(rank: int, size: int, group: Any, how: str) -> list[str]:
    """Ends the pipeline while the device still works at its last step; the results are whole."""
    emulator, compute = control(), compute_stream()
    emulator.reset_counters()
    emulator.set("delay_us", 20_000)
    modules, batch, loss = make("mlp", size)
    reference = twins(modules)
    x, y = batch(9)
    found: list[str] = []
    try:
        with compute.installed():
            stage = pypipe.PipelineStage(modules[rank], rank, size, CPU, group=group)
            schedule = pypipe.Schedule1F1B(stage, n_microbatches=3, loss_fn=loss, timeout=30)
            schedule.step(x, target=y)
            if how == "close":
                schedule.close()
                schedule.close()
            del schedule, stage
            gc.collect()
        loss(unpipelined(reference, x), y).backward()
        for (name, a), b in zip(modules[rank].named_parameters(), reference[rank].parameters(), strict=True):
            if not difference(a.grad, b.grad) <= TOLERANCE:
                found.append(f"rank {rank}: the gradient of {name} differs")
        emulator.settle(compute.handle)
        return found + hazards(emulator, rank)
    finally:
        emulator.set("delay_us", 100)


def with_a_transfer_that_hangs(rank: int, size: int, group: Any) -> tuple[str, str]:
    """Rank 1 closes although its last send never ends. Returns what the step and the next one raised."""
    emulator, compute = control(), compute_stream()
    emulator.reset_counters()
    with compute.installed(), patch.object(nccl.NcclTransport, "_CLOSING_SECONDS", 0.5):
        schedule = _schedule(rank, size, group)
        x = _batch()
        schedule.step(x, target=x)
        if rank == size - 1:  # it sends nothing but gradients: its last operation is the last of them
            emulator.fault(f"hang@{emulator.operations() + 8}")
        raised = _raised(lambda: schedule.step(x, target=x))
        emulator.fault("")
        schedule.close()
        again = _raised(lambda: schedule.step(x, target=x))
    emulator.reset_counters()
    return raised, again


def interrupted_close(rank: int, size: int, group: Any) -> str:
    """Ctrl-C on rank 0, which closes, while the others don't until it has: what its close() raised."""
    emulator, compute = control(), compute_stream()
    emulator.reset_counters()
    raised = ""
    with compute.installed(), patch.object(nccl.NcclTransport, "_CLOSING_SECONDS", 300.0):
        schedule = _schedule(rank, size, group)
        x = _batch()
        schedule.step(x, target=x)
        if rank == 0:
            timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
            timer.start()
            try:
                schedule.close()
            except KeyboardInterrupt as error:
                raised = type(error).__name__
            timer.join()
        dist.barrier(group)
        schedule.close()
    emulator.reset_counters()
    return raised


def while_others_step(rank: int, size: int, group: Any, how: str) -> str:
    """Rank 1 leaves instead of making its second step; what the others raise: at once, or this ends in minutes."""
    emulator, compute = control(), compute_stream()
    emulator.reset_counters()
    with compute.installed(), patch.object(nccl.NcclTransport, "_CLOSING_SECONDS", 300.0):
        schedule = _schedule(rank, size, group)
        x = _batch()
        schedule.step(x, target=x)
        if rank == 1 and how == "close":
            schedule.close()
            return ""
        if rank == 1:
            schedule._settings.pieces[0][1].register_forward_pre_hook(_fail)
        try:
            schedule.step(x, target=x)
        except (pypipe.PipelineError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            schedule.close()
            emulator.reset_counters()
    return "nothing was raised"


def _fail(*_: Any) -> None:
    raise ValueError("on purpose")
