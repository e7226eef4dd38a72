"""The demo's two trainings: one rank's part of the pipelined one, and the unpipelined one to compare with."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pypipe import PipelineStage, Schedule
from pypipe.commands.demo.meter import StepReport, TraceReport
from pypipe.commands.demo.model import Shape, batches, build_stage, encode, loss_of, optimizer_for
from pypipe.commands.demo.options import Options
from pypipe.program.drawing import chrome_trace


def train_rank(
    rank: int,
    report: Callable[[StepReport | TraceReport], None],
    options: Options,
    text: str,
    store: Path,
    traced: bool,
) -> None:
    """Trains the stages of one rank, and reports each step.

    Args:
        text: the same on every rank.
        store: a file that does not exist yet; the ranks find each other through it.
        traced: whether rank 0 reports a trace of the last step too.
    """
    torch.set_num_threads(1)  # the ranks share the machine
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they are all here, so no other interface need work
    size = options.stages
    rendezvous = dist.FileStore(str(store), size)  # type: ignore[attr-defined]  # public, but not in __all__
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=size)
    shape, data = _prepare(options, text)
    program = options.program
    held = [
        (piece, build_stage(shape, piece, options.n_stages, options.seed))
        for chain in program.chains
        for piece, stage in enumerate(chain.stages)
        if program.placement[stage] == rank
    ]
    modules = nn.ModuleList(module for _, module in held)
    clock = _ForwardClock(modules)
    optimizer = optimizer_for(modules)
    cpu = torch.device("cpu")
    stages = [
        PipelineStage(module, stage_index=piece, num_stages=options.n_stages, device=cpu) for piece, module in held
    ]
    schedule = Schedule(options.schedule, stages, n_microbatches=options.microbatches, loss_fn=loss_of)
    reports_loss = rank == program.placement[program.chains[0].stages[-1]]
    begun = time.perf_counter()
    trace = schedule.trace()
    for step, (x, y) in enumerate(data):
        losses: list[Tensor] = []
        with trace if traced and step == options.steps - 1 else contextlib.nullcontext():
            schedule.step(x, target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        ended = time.perf_counter()
        report(
            StepReport(
                loss=_mean_loss(losses, options) if reports_loss else None,
                seconds=ended - begun,
                step_seconds=schedule.step_seconds,
                busy_seconds=schedule.busy_seconds,
                forward_seconds=clock.read(),
            )
        )
        begun = ended
    if traced and rank == 0:
        report(TraceReport(chrome_trace(*trace.panels)))
    schedule.close()
    dist.destroy_process_group()


def train_unpipelined(options: Options, text: str) -> Iterator[float]:
    """Trains the whole model on whole batches in this process, and yields each step's loss.

    It computes on as many threads as the process may use cores, as a user without a pipeline would.
    """
    shape, data = _prepare(options, text)
    module = build_stage(shape, 0, 1, options.seed)
    optimizer = optimizer_for(module)
    for x, y in data:
        loss = loss_of(module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def _prepare(options: Options, text: str) -> tuple[Shape, Iterator[tuple[Tensor, Tensor]]]:
    tokens, vocabulary = encode(text)
    shape = Shape(vocabulary, options.context, options.width, options.n_blocks)
    return shape, batches(tokens, options.batch, options.context, options.steps, options.seed)


def _mean_loss(losses: list[Tensor], options: Options) -> float:
    """The mean over the batch: microbatches weighted by their sizes, those of torch.tensor_split."""
    size, left_over = divmod(options.batch, options.microbatches)
    sizes = [size + (microbatch < left_over) for microbatch in range(options.microbatches)]
    return sum(loss.item() * size for loss, size in zip(losses, sizes, strict=True)) / options.batch


class _ForwardClock:
    """Adds up the wall-clock seconds that modules spend in forward."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._begun = self._seconds = 0.0
        for module in modules:
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end)

    def read(self) -> float:
        """Returns the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _begin(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        self._begun = time.perf_counter()

    def _end(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        self._seconds += time.perf_counter() - self._begun
