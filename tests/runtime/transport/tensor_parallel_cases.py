"""Tensor-parallel stages: two ranks a stage, or four, against the whole model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as funcol
import transparency
from gradients import grad
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import pypipe
from pypipe.runtime.tensor_memory import copy_of

CPU = torch.device("cpu")
WIDTH, LENGTH = 8, 4


class Case(NamedTuple):
    """One comparison: what stages are, and what crosses their boundaries."""

    schedule: str
    style: str
    pipeline: int = 2


class Block(nn.Module):
    """An MLP with a normalisation before it and a parameter that is added as it is."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        match self.style:
            case "plain" | "partial":  # RowwiseParallel ends in a collective that nobody has waited for, or in none
                return y
            case "residual":
                return x + y
            case "to_local":  # a DTensor parameter whose gradient is what was received
                shift = self.shift.to_local() if isinstance(self.shift, DTensor) else self.shift
                return y + x * 0.5 + shift
        return x + y  # DTensors throughout


_meshes: dict[Any, DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of all ranks, made once a process."""
    key = shape, names
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[key]


def parallelize(block: Block, mesh: DeviceMesh, style: str, first: bool) -> nn.Module:
    """As a trainer would do it."""
    if style in ("plain", "residual", "to_local", "fsdp"):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if style == "to_local":
            block.shift = nn.Parameter(distribute_tensor(block.shift.data, mesh, [Replicate()]))
        return block
    # What crosses is a DTensor, cut along the sequence, whole, or a partial sum.
    between = {"shard": Shard(1), "replicate": Replicate(), "partial": Partial()}[style]
    inside = between if style == "shard" else Replicate()
    plan: dict[str, ParallelStyle] = {
        "norm": SequenceParallel(use_local_output=False) if style == "shard" else PrepareModuleInput(),
        "up": ColwiseParallel(input_layouts=inside, use_local_output=False),
        "down": RowwiseParallel(output_layouts=between if style == "partial" else inside, use_local_output=False),
    }
    if style != "shard":
        del plan["norm"]
        for name, parameter in block.norm.named_parameters():
            replicated = nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()]))
            block.norm.register_parameter(name, replicated)
    parallelize_module(block, mesh, plan)
    return Distributed(block, mesh, inside, between, first)


class Distributed(nn.Module):
    """Takes plain tensors in the first stage, and DTensors elsewhere."""

    def __init__(self, block: Block, mesh: DeviceMesh, inside: Any, between: Any, first: bool) -> None:
        super().__init__()
        self.block, self.mesh, self.inside, self.between, self.first = block, mesh, inside, between, first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        assert isinstance(x, DTensor)
        if not self.first:
            assert x.placements == (self.between,)
            assert x.shape[1:] == (LENGTH, WIDTH)
        y = self.block(x.redistribute(placements=[self.inside]))
        return y if y.placements == (self.between,) else y.redistribute(placements=[self.between])


def loss_of(output: Any, target: Tensor) -> Tensor:
    """A mean over whole tensors."""
    return functional.mse_loss(output.full_tensor() if isinstance(output, DTensor) else output, target)


def train(rank: int, size: int, group: Any, case: Case) -> list[str]:
    """Two steps, with optimizer steps and an eval between them."""
    if case.style == "fsdp":
        mesh = mesh_of((2, 2), ("dp", "tp"))
        pipes = mesh_of((4, 1), ("all", "pp"))
    else:
        mesh = pipes = mesh_of((case.pipeline, size // case.pipeline), ("pp", "tp"))
    place = pipes["pp"].get_local_rank()
    count = transparency.count_stages(case.schedule, case.pipeline)
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        blocks = [Block(case.style).double() for _ in range(count)]
        batches = [torch.randn(2, 5, LENGTH, WIDTH, dtype=torch.float64) for _ in range(2)]
    reference = copy.deepcopy(blocks)
    held = transparency.pieces_of(case.schedule, place, case.pipeline)
    modules = [
        parallelize(block, mesh["tp"], case.style, number == 0) if number in held else block
        for number, block in enumerate(blocks)
    ]
    if case.style == "fsdp":
        for number in held:
            fully_shard(modules[number], mesh=mesh["dp"])
    built = transparency.build(
        place, case.pipeline, pipes["pp"].get_group(), case.schedule, modules, 3, loss_fn=loss_of, timeout=30
    )
    differences: list[str] = []
    mine = torch.optim.SGD([p for _, module in built.held for p in module.parameters()], lr=0.1)
    theirs = torch.optim.SGD([p for block in reference for p in block.parameters()], lr=0.1)
    for number, (x, y) in enumerate(batches):
        built.schedule.step(x, target=y, return_outputs=False)
        loss_of(_run(reference, x), y).backward()
        for piece, module in built.held:
            named = zip(module.named_parameters(), reference[piece].parameters(), strict=True)
            for (name, a), b in named:
                gradient = a.grad.full_tensor() if isinstance(a.grad, DTensor) else a.grad
                worst = transparency.difference(gradient, b.grad)
                if not worst <= transparency.TOLERANCE:
                    differences.append(f"rank {rank}: {name} of stage {piece}, step {number}, differs by {worst:g}")
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        losses: list[Tensor] = []
        built.schedule.eval(x, target=y, losses=losses, return_outputs=False)
        if losses:
            with torch.no_grad():
                expected = [
                    loss_of(_run(reference, a), b)
                    for a, b in zip(torch.tensor_split(x, 3), torch.tensor_split(y, 3), strict=True)
                ]
            worst = transparency.difference(torch.stack(losses), torch.stack(expected))
            if not worst <= transparency.TOLERANCE:
                differences.append(f"rank {rank}: losses of eval {number} differ by {worst:g}")
    built.schedule.close()
    return differences


def _run(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def train_many(rank: int, size: int, group: Any, cases: list[Case]) -> list[str]:
    """Several cases in one call."""
    return [f"{case}: {text}" for case in cases for text in train(rank, size, group, case)]


def copied(rank: int, size: int, group: Any) -> list[str]:
    """A partial sum is copied without a collective: another rank of the mesh may have nothing to copy."""
    mesh = mesh_of((2, 2), ("pp", "tp"))["tp"]
    partial = DTensor.from_local(torch.full((3,), float(rank)), mesh, [Partial()], run_check=False)
    wrong = []
    if mesh.get_local_rank() == 0:
        copy_made = copy_of(partial)
        partial.to_local().zero_()
        if not isinstance(copy_made, DTensor) or copy_made.placements != (Partial(),) or copy_made.shape != (3,):
            wrong.append(f"rank {rank}: the copy is {copy_made}")
        elif copy_made.to_local().tolist() != [rank] * 3:
            wrong.append(f"rank {rank}: the copy shares memory, or has other values")
    coming = funcol.all_reduce(torch.ones(2), "sum", mesh)
    if copy_of(coming).tolist() != [2.0, 2.0]:
        wrong.append(f"rank {rank}: a collective's result was copied before it was there")
    return wrong


class _Bare(nn.Module):
    """A stage without a parameter on a mesh."""

    def forward(self, x: Any) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x


class _Sends(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        return DTensor.from_local(x * self.weight, self.mesh, [Shard(1)], run_check=False)


def without_a_mesh(rank: int, size: int, group: Any, gives: bool) -> str | list[float]:
    """The second stage has no parameter that tells the mesh: refused, or found by get_mesh=."""
    mesh = mesh_of((2, 2), ("pp", "tp"))
    place = mesh["pp"].get_local_rank()
    sends = _Sends(mesh["tp"])
    stage = pypipe.PipelineStage(
        _Bare() if place else sends,
        place,
        2,
        CPU,
        group=mesh["pp"].get_group(),
        get_mesh=(lambda names, layout: mesh[names]) if gives and place else None,
    )
    schedule = pypipe.Schedule1F1B(stage, 2, lambda output, target: (output * target).sum(), scale_grads=False)
    x = torch.ones(2, WIDTH)
    try:
        schedule.step(x, target=torch.arange(2.0 * WIDTH).expand(2, 2 * WIDTH))
    except pypipe.PipelineError as error:
        return str(error)
    finally:
        schedule.close()
    return [] if place else grad(sends.weight).tolist()
