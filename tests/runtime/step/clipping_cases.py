"""Clipping by the norm of all stages' gradients, against the unpipelined model's torch.nn.utils.clip_grad_norm_."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transparency
from data_parallel_cases import Case, Replicas, whole
from model_copies_cases import WIDTH, LossWithParameters
from models import Block, unpipelined
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import pypipe

NORMS = [2.0, float("inf"), 3.0, 1.0]


def _compare(norm: Tensor, expected: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], what: str) -> list[str]:
    found = []
    if not abs(float(norm) / float(expected) - 1) <= 1e-12 or norm.dtype != expected.dtype or norm.dim():
        found.append(f"{what}: the norm is {norm!r}, not {expected!r}")
    for mine, theirs in pairs:
        gradient = None if mine.grad is None else whole(mine.grad)
        if not transparency.difference(gradient, theirs.grad) <= transparency.TOLERANCE:
            found.append(f"{what}: a gradient differs")
    return found


def clip(rank: int, size: int, group: Any, name: str) -> tuple[list[float], list[str]]:
    """The norms that a rank got, and what is wrong; the first stage is frozen at last, and the loss has parameters."""
    torch.manual_seed(3)
    modules: list[nn.Module] = [Block(WIDTH).double() for _ in range(transparency.count_stages(name, size))]
    loss, their_loss = LossWithParameters().double(), None
    their_loss = copy.deepcopy(loss)
    reference = copy.deepcopy(modules)
    built = transparency.build(rank, size, group, name, modules, 4, loss_fn=loss, timeout=20)
    norms, found = [], []
    for step, norm_type in enumerate(NORMS):
        if step == 2:
            for module in (*modules, *reference, *(module for _, module in built.held)):
                module.zero_grad()
            for piece, module in built.held:
                module.requires_grad_(piece > 0)
            reference[0].requires_grad_(False)
        x, y = torch.randn(2, 9, WIDTH, dtype=torch.float64)
        built.schedule.step(x, target=y)
        their_loss(unpipelined(reference, x), y).backward()
        norm = built.schedule.clip_grad_norm_(0.01, norm_type, foreach=None if step else False)
        expected = nn.utils.clip_grad_norm_(
            [p for module in (*reference, their_loss) for p in module.parameters()], 0.01, norm_type
        )
        assert expected > 0.01
        pairs = [
            pair
            for piece, module in built.held
            for pair in zip(module.parameters(), reference[piece].parameters(), strict=True)
        ]
        if any(piece == len(modules) - 1 for piece, _ in built.held):
            pairs += zip(loss.parameters(), their_loss.parameters(), strict=True)
        norms.append(float(norm))
        found += _compare(norm, expected, pairs, f"rank {rank}, norm {norm_type:g}")
    built.schedule.close()
    return norms, found


class Parallel(nn.Module):
    """Two linear layers that are cut over two ranks, and parameters that are not: plain ones, and DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(x))) * self.scale


def clip_tensor_parallel(rank: int, size: int, group: Any) -> list[str]:
    """Two stages of two ranks each: shards, replicated DTensors and plain parameters in one stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(4)
    modules: list[nn.Module] = [Parallel().double() for _ in range(2)]
    reference = copy.deepcopy(modules)
    place = mesh["pp"].get_local_rank()
    module = parallelize_module(modules[place], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    stage = pypipe.PipelineStage(module, place, 2, group=mesh["pp"].get_group())
    schedule = pypipe.Schedule1F1B(stage, 3, functional.mse_loss, timeout=20)
    found = []
    for norm_type in NORMS:
        x, y = torch.randn(2, 6, WIDTH, dtype=torch.float64)
        schedule.step(x, target=y)
        functional.mse_loss(unpipelined(reference, x), y).backward()
        norm = schedule.clip_grad_norm_(0.01, norm_type)
        expected = nn.utils.clip_grad_norm_([p for each in reference for p in each.parameters()], 0.01, norm_type)
        pairs: list[tuple[Tensor, Tensor]] = list(zip(module.parameters(), reference[place].parameters(), strict=True))
        found += _compare(norm, expected, pairs, f"rank {rank}, norm {norm_type:g}")
    schedule.close()
    return found


def clip_replicas(rank: int, size: int, group: Any, cases: list[Case]) -> list[str]:
    """Stages in DDP or fully_shard: the norm of one model on all batches."""
    found = []
    for case in cases:
        replicas = Replicas(rank, size, case)
        for step, norm_type in enumerate(NORMS):
            replicas.step(step)
            norm = replicas.schedule.clip_grad_norm_(0.01, norm_type)
            expected = nn.utils.clip_grad_norm_(
                [p for piece in replicas.reference for p in piece.parameters()], 0.01, norm_type
            )
            pairs = [
                pair
                for piece, module in replicas.held
                for pair in zip(module.parameters(), replicas.reference[piece].parameters(), strict=True)
            ]
            found += _compare(norm, expected, pairs, f"rank {rank}, {case}, norm {norm_type:g}")
            replicas.update()
        replicas.schedule.close()
    return found


def dtypes(rank: int, size: int, group: Any) -> list[Any]:
    """One stage in float64, one in float32, one of a single parameter that is outside; then one more parameter."""
    torch.manual_seed(5)
    module = nn.Linear(WIDTH, WIDTH, dtype=torch.float64 if rank == 0 else torch.float32)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Any:
            return self.module(x.to(self.module.weight.dtype))

    stage = pypipe.PipelineStage(Cast(), rank, size, group=group)
    schedule = pypipe.Schedule1F1B(stage, 2, functional.mse_loss, timeout=20)
    schedule.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH))
    further = nn.Parameter(torch.zeros(1))
    further.grad = torch.full((1,), 7.0)
    without = schedule.clip_grad_norm_(1e9)
    norm = schedule.clip_grad_norm_(1e9, parameters=[further, module.weight] if rank == 1 else ())
    squares = sum(float(p.grad.double().square().sum()) for p in module.parameters() if p.grad is not None)
    schedule.clip_grad_norm_(0.0, parameters=[further])
    schedule.close()
    return [str(norm.dtype), float(without), float(norm), squares, float(further.grad)]


def busy(rank: int, size: int, group: Any) -> float:
    """A rank is busy for longer than the timeout, and says so."""
    torch.manual_seed(5)
    stage = pypipe.PipelineStage(Block(WIDTH), rank, size, group=group)
    with pypipe.Schedule1F1B(stage, 2, functional.mse_loss, timeout=2) as schedule:
        schedule.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH))
        if rank == 1:
            with schedule.busy("looking at gradients"):
                time.sleep(4.5)
        return float(schedule.clip_grad_norm_(1.0))


def wrong(rank: int, size: int, group: Any, case: str) -> list[str]:
    """What a rank sees of a call that cannot work, and of the next step."""
    torch.manual_seed(5)
    stage = pypipe.PipelineStage(Block(WIDTH), rank, size, group=group)
    timeout = 2 if case in ("one rank only", "one rank steps on") else 20
    schedule = pypipe.Schedule1F1B(stage, 2, functional.mse_loss, timeout=timeout)
    x, y = torch.randn(2, 4, WIDTH)
    calls: list[Callable[[], Any]] = []

    def clip() -> Any:
        return schedule.clip_grad_norm_(1.0, error_if_nonfinite=True)

    if case != "before the first step":
        schedule.step(x, target=y)
    parameter = next(stage.submod.parameters())
    assert case == "before the first step" or parameter.grad is not None
    match case:
        case "before the first step":
            calls = [clip]
        case "not finite":
            if rank == 0:
                parameter.grad.fill_(torch.nan)  # type: ignore[union-attr]
            calls = [clip, lambda: schedule.step(x, target=y)]
        case "no norm":
            calls = [lambda: schedule.clip_grad_norm_(1.0, 0.0), lambda: schedule.step(x, target=y)]
        case "one rank only":
            calls = [clip] if rank == 0 else []
        case "one rank steps on":
            calls = [clip] if rank == 0 else [lambda: schedule.step(x, target=y)]
        case "another norm":
            calls = [lambda: schedule.clip_grad_norm_(1.0, 1.0 + rank)]
        case "a peer has closed":
            calls = [clip] if rank == 0 else [schedule.close]
        case "sparse":
            table = nn.Parameter(torch.zeros(2, 2))
            table.grad = torch.zeros(2, 2).to_sparse()
            calls = [lambda: schedule.clip_grad_norm_(1.0, parameters=[table] if rank == 1 else [])]
        case "an error on one rank":
            bad = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
            bad.grad = torch.zeros(2, dtype=torch.int64)
            calls = [lambda: schedule.clip_grad_norm_(1.0, parameters=[bad] if rank == 1 else [])]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    if case == "one rank only":
        dist.barrier(group)  # meanwhile rank 1 is there, and in no call
    with contextlib.suppress(pypipe.PipelineError):
        schedule.close()
    return said
