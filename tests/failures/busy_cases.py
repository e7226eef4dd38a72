"""A rank that is busy for longer than its peers' timeout, and then is stuck."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from campaign_faults import no_hurry
from nccl_cases import control
from torch import nn

import pypipe
from pypipe.runtime.transport.links import nccl

TIMEOUT = 1.0


def over_nccl(rank: int, size: int, group: Any) -> str:
    """As busy_then_stuck(); no message leaves before its receiver is there, and each may take one timeout."""
    emulator = control()
    emulator.set("staging", 0)
    try:
        return busy_then_stuck(rank, size, group, TIMEOUT)
    finally:
        emulator.set("staging", 65536)
        emulator.reset_counters()


def busy_then_stuck(rank: int, size: int, group: Any, transfer_limit: float | None = None) -> str:
    """The last rank is busy in a step until the others have waited three timeouts, and stuck in the next step.

    Args:
        transfer_limit: over NCCL, seconds for a transfer, in place of those that follow from the timeout.

    Returns:
        What the second one raised.
    """
    stage = pypipe.PipelineStage(nn.Linear(4, 4), rank, size, torch.device("cpu"), group=group)
    schedule = pypipe.Schedule1F1B(stage, 2, nn.functional.mse_loss, timeout=TIMEOUT)
    x = torch.ones(4, 4)
    limits = patch.object(nccl, "_transfer_limit", lambda timeout: transfer_limit or timeout)
    with no_hurry(), limits:
        schedule.step(x, target=x)
    schedule._pipeline.recorder.core.set_busy("")  # type: ignore[union-attr]
    dist.barrier(group)
    hub = schedule._pipeline._running.connection.hub  # type: ignore[union-attr]
    last = rank == size - 1
    if last:
        with schedule.busy("writing a checkpoint"):
            threading.Event().wait(3 * TIMEOUT)
    schedule.step(x, target=x)
    dist.barrier(group)
    if last:
        for _ in range(1000):  # until the others have had enough
            if hub.cause() is not None:
                break
            threading.Event().wait(0.05)
    try:
        schedule.step(x, target=x)
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        schedule.close()
    return ""
