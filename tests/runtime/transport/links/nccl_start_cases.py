"""How pipelines over the NCCL link start: beside other transports, and what they refuse or warn of."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import transparency
from models import make
from nccl_cases import compute_stream, control, hazards
from torch.nn import functional

import pypipe
from pypipe.program import Link
from pypipe.runtime.transport import connection
from pypipe.runtime.transport.links.registry import TRANSPORTS
from pypipe.runtime.transport.links.transport import Transport

CPU = torch.device("cpu")


@contextlib.contextmanager
def _carried(ways: Sequence[str]) -> Iterator[None]:
    """Links between ranks i and j go the way number min(i, j), as between GPUs, CPUs and hosts of all kinds."""

    def transport_of(link: Link, configs: object) -> type[Transport]:
        return TRANSPORTS[ways[min(link.source_rank, link.target_rank) % len(ways)]]

    with patch.object(connection, "transport_of", transport_of):
        yield


def mixed(rank: int, size: int, group: Any, ways: Sequence[str], cases: list[tuple[int, Any]]) -> list[str]:
    """As nccl_cases.seeds, where each pair of ranks has a transport of its own."""
    emulator, compute = control(), compute_stream()
    found: list[str] = []
    for seed, case in cases:
        emulator.reset_counters()
        emulator.set("seed", seed * 64 + rank)
        with compute.installed(), _carried(ways):
            found += transparency.compare(rank, size, group, *case)
        emulator.settle(compute.handle)
        found += hazards(emulator, rank)
    return found


def _attempt(rank: int, size: int, group: Any, **options: Any) -> str:
    """Builds a schedule and makes one step; returns what was raised."""
    modules, batch, loss = make("mlp", size)
    name = options.pop("name", "Schedule1F1B")
    x, y = batch(8)
    try:
        schedule, _ = transparency.build(rank, size, group, name, modules, 4, CPU, loss_fn=loss, timeout=20, **options)
        try:
            schedule.step(x, target=y)
        finally:
            schedule.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def checksum(rank: int, size: int, group: Any, ways: Sequence[str]) -> str:
    """check="checksum" where some links are NCCL's."""
    with _carried(ways):
        return _attempt(rank, size, group, check="checksum")


def disagreeing(rank: int, size: int, group: Any) -> str:
    """Rank 0 asks for a communicator for each link, the others for one for each pair."""
    with patch.dict(os.environ, PYPIPE_NCCL_COMMUNICATORS="pair" if rank else "link"):
        return _attempt(rank, size, group)


def thread_blocks(rank: int, size: int, group: Any, values: Sequence[str]) -> str:
    """Each rank with its own PYPIPE_NCCL_MAX_CTAS."""
    with patch.dict(os.environ, PYPIPE_NCCL_MAX_CTAS=values[rank]):
        return _attempt(rank, size, group)


def small_device(rank: int, size: int, group: Any, multiprocessors: int) -> tuple[str, list[str]]:
    """Which communicators there are on a GPU of so many multiprocessors, and what is said about them."""
    modules, batch, loss = make("mlp", size)
    stage = pypipe.PipelineStage(modules[rank], rank, size, CPU, group=group)
    schedule = pypipe.Schedule1F1B(stage, 4, loss, timeout=20)
    x, y = batch(8)
    with (
        patch.object(connection, "multiprocessors", lambda device, choice: multiprocessors),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        schedule.step(x, target=y)
    running = schedule._pipeline._running
    assert running is not None
    held = running.connection.issue is not None
    schedule.close()
    return "one for each pair" if held else "one for each link", [str(each.message) for each in seen]


def warned(rank: int, size: int, group: Any, connections: str) -> list[str]:
    """The warnings of a first step under CUDA_DEVICE_MAX_CONNECTIONS."""
    stage = pypipe.PipelineStage(torch.nn.Linear(4, 4), rank, size, CPU, group=group)
    schedule = pypipe.ScheduleGPipe(stage, 2, functional.mse_loss, timeout=20)
    x = torch.randn(4, 4)
    with patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS=connections), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        schedule.step(x, target=x)
        schedule.step(x, target=x)
    schedule.close()
    return [f"{each.category.__name__}: {each.message}" for each in seen]
