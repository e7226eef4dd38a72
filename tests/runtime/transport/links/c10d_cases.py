"""Pipelines over torch.distributed's own backend. Run as a script: one rank of a job on several (virtual) hosts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import transparency
from models import make
from torch import Tensor, nn
from torch.nn import functional

import pypipe

CPU = torch.device("cpu")


class Traffic:
    """Counts what goes through torch.distributed."""

    def __init__(self) -> None:
        self.sent = self.received = 0


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Counts isend and irecv of this process for a while."""
    traffic = Traffic()
    isend, irecv = dist.isend, dist.irecv

    def counting_isend(*args: Any, **kwargs: Any) -> Any:
        traffic.sent += 1
        return isend(*args, **kwargs)

    def counting_irecv(*args: Any, **kwargs: Any) -> Any:
        traffic.received += 1
        return irecv(*args, **kwargs)

    dist.isend, dist.irecv = counting_isend, counting_irecv
    try:
        yield traffic
    finally:
        dist.isend, dist.irecv = isend, irecv


@contextlib.contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    """Puts another function in the place of one of torch.distributed for a while."""
    before = getattr(dist, name)
    setattr(dist, name, value)
    try:
        yield
    finally:
        setattr(dist, name, before)


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """PYPIPE_LINK=c10d for a while."""
    os.environ["PYPIPE_LINK"] = "c10d"
    try:
        yield
    finally:
        del os.environ["PYPIPE_LINK"]


def compare_many(rank: int, size: int, group: Any, cases: list[tuple[str, str, int, int, bool]]) -> list[str]:
    """The transparency comparison over c10d."""
    with forced(), counted() as traffic:
        found = transparency.compare_many(rank, size, group, cases)
    if size > 1 and not (traffic.sent and traffic.received):
        found.append(f"rank {rank} sent {traffic.sent} and received {traffic.received} messages over c10d")
    return found


def asked_for_by_one_rank(rank: int, size: int, group: Any) -> list[str]:
    """PYPIPE_LINK=c10d on rank 1 alone makes all ranks use it."""
    with forced() if rank == 1 else contextlib.nullcontext(), counted() as traffic:
        found = transparency.compare(rank, size, group, "Schedule1F1B", "mlp", 2, 4, True)
    return found if traffic.sent and traffic.received else [*found, f"rank {rank} did not use c10d"]


class Calls(nn.Module):
    """Calls something at every forward."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(6, 6).double(), call

    def forward(self, x: Tensor) -> Tensor:
        self.call()
        return self.linear(x)


def build(rank: int, size: int, group: Any, timeout: float, module: nn.Module | None = None) -> tuple[Any, Any, Any]:
    modules, make_batch, loss_fn = make("mlp", size)
    stage = pypipe.PipelineStage(module or modules[rank], rank, size, CPU, group=group)
    schedule = pypipe.Schedule1F1B(stage, 2, loss_fn, timeout=timeout)
    return schedule, *make_batch(4)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:
        return f"not pypipe's: {type(error).__name__}: {error}"
    return ""


def another_layout_per_message(rank: int, size: int, group: Any) -> list[str]:
    """Batches of other lengths at every step: buffers grow while messages are under way."""
    found = []
    with forced(), counted():
        for rows in (2, 9, 3, 200, 5):
            found += transparency.compare(rank, size, group, "Schedule1F1B", "gpt", 2, rows, True)
    return found


def no_process_group(rank: int, size: int, group: Any) -> str:
    """c10d is asked for where there is no process group."""
    world_store = dist.distributed_c10d._get_default_store()
    stage = pypipe.PipelineStage(make("mlp", size)[0][rank], rank, size, CPU, group=group)
    object.__setattr__(stage.world, "group", None)
    assert world_store is not None
    with forced():
        schedule = pypipe.ScheduleGPipe(stage, 2, functional.mse_loss, timeout=10.0)
        x = torch.randn(4, 6, dtype=torch.float64)
        text = error_of(lambda: schedule.step(x, target=x))
        schedule.close()
    return text
