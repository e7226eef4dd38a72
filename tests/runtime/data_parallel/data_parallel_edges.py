"""Replicated and sharded stages where something is unusual: reduced precision, failures, what is refused, traces."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transparency
from data_parallel_cases import CPU, SPARSE, WIDTH, Case, Piece, Replicas, mesh_of, no_sync, whole, wrap
from gradients import grad
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import pypipe


def mixed_precision(rank: int, size: int, group: Any, name: str) -> list[str]:
    """Against fully_shard's own accumulation of microbatches, without a pipeline: bit by bit."""
    mesh = mesh_of(size, 2)
    place, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    count = transparency.count_stages(name, 2)
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        modules: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
        batches = [[torch.randn(2, 8, WIDTH) for _ in range(2)] for _ in range(2)]
    reference = nn.Sequential(*copy.deepcopy(modules))
    for module in [*modules, *reference]:
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(reference, mesh=mesh["dp"])
    assert isinstance(reference, FSDPModule)
    schedule, held = transparency.build(
        place, 2, mesh["pp"].get_group(), name, modules, 4, loss_fn=functional.mse_loss, timeout=30
    )
    differences = []
    for step in range(2):
        x, y = batches[step][replica]
        schedule.step(x, target=y)
        for number, (a, b) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
            reference.set_requires_gradient_sync(number == 3)
            (functional.mse_loss(reference(a), b) / 4).backward()
        for piece, module in held:
            named = zip(module.named_parameters(), reference[piece].parameters(), strict=True)
            for (parameter, mine), theirs in named:
                a, b = whole(grad(mine)), whole(grad(theirs))
                if a.dtype != b.dtype or not torch.allclose(a, b, rtol=1e-6, atol=1e-9):
                    worst = float((a - b).abs().max())
                    differences.append(f"rank {rank}: {parameter} of stage {piece}, step {step}: {worst:g} off")
    schedule.close()
    return differences


class _Faulty(nn.Module):
    """Fails when it is told to."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.fails_at = -1
        self.fails_in_backward = False
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls != self.fails_at:
            return self.module(x)
        if not self.fails_in_backward:
            raise ValueError("told to")
        y = self.module(x)
        y.register_hook(_fail)
        return y


def _fail(_: Tensor) -> None:
    raise ValueError("told to")


def after_a_failure(rank: int, size: int, group: Any, wrapper: str) -> list[str]:
    """A step that fails in the middle, in all replicas alike; then zero_grad(), a new schedule, the right numbers."""
    case = Case("ScheduleZBH1", wrapper, 4, 8)
    replicas = Replicas(rank, size, case)
    found: list[str] = []
    (_, module) = replicas.held[0]
    faulty = _Faulty(module)
    if replicas.place == 1:
        faulty.fails_at = 3
    stage = pypipe.PipelineStage(faulty, replicas.place, 2, CPU, group=replicas.mesh["pp"].get_group())
    schedule = pypipe.ScheduleZBH1(stage, 4, functional.mse_loss, timeout=30)
    x, y = replicas.batch(50, replicas.replica)
    try:
        schedule.step(x, target=y)
        found.append("nothing was raised")
    except (ValueError, pypipe.RemoteStageError) as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        wanted = "have been dropped; .grad is what it was" if wrapper.startswith("fsdp") else "is not reduced among its"
        if wanted not in notes:
            found.append(f"rank {rank} says nothing of what has become of its gradients: {notes}")
    if wrapper.startswith("fsdp"):
        found += [f"{n} is not sharded" for n, p in module.named_parameters() if not hasattr(p, "full_tensor")]
        found += [f"{n} has a gradient" for n, p in module.named_parameters() if p.grad is not None]
    schedule.close()
    replicas.zero_grad()
    replicas.step(0)
    replicas.check_gradients("the step after the failed one")
    replicas.schedule.close()
    return found + replicas.differences


def one_replica_fails(rank: int, size: int, group: Any, schedule: str, wrapper: str, where: str) -> list[str]:
    """A step or eval that fails in replica 1 only; then new schedules, and the right numbers in both replicas."""
    replicas = Replicas(rank, size, Case(schedule, wrapper, 4, 8))
    if where == "second step":  # in which DDP's first forward makes its buckets anew, on all replicas
        replicas.step(9)
        replicas.zero_grad()
    modules: list[nn.Module] = [_Faulty(module) for module in replicas.modules]
    built = transparency.build(
        replicas.place, 2, replicas.mesh["pp"].get_group(), schedule, modules, 4,
        loss_fn=functional.mse_loss, timeout=30,
    )  # fmt: skip
    _, faulty = built.held[0]
    assert isinstance(faulty, _Faulty)
    if replicas.replica == 1 and replicas.place == (where == "forward"):
        faulty.fails_at = {"first forward": 1, "second step": 1, "input": 99}.get(where, 3)
        faulty.fails_in_backward = where == "backward"
    x, y = replicas.batch(50, replicas.replica)
    found = []
    try:
        with built.schedule as running:
            if where == "eval":
                running.eval(x)
            elif faulty.fails_at == 99:
                running.step(x[:3], target=y)
            else:
                running.step(x, target=y)
        # Of an eval(), and of what fails on the first rank at the end, the other ranks may have returned by then.
        if where != "eval" and not (where == "backward" and replicas.place == 1):
            found.append(f"rank {rank} raised nothing")
    except (ValueError, pypipe.PipelineError) as error:
        if replicas.replica == 0 and "another replica of the pipeline failed in this step, on global" not in str(error):
            found.append(f"rank {rank} of the other replica says {error}")
    replicas.zero_grad()
    for step in range(2):
        replicas.step(step)
        replicas.check_gradients(f"step {step} after the failed one")
        replicas.update()
    replicas.schedule.close()
    return found + replicas.differences


def static_graph_outside(rank: int, size: int, group: Any) -> list[str]:
    """A module with a static graph outside of schedules: before and after a step, and in a second schedule."""
    replicas = Replicas(rank, size, Case("Schedule1F1B", "static", 4, 8))
    _, module = replicas.held[0]
    x, _ = replicas.batch(1, 0)
    found = []
    for step in range(2):
        replicas.step(step)
        replicas.check_gradients(f"step {step}")
        replicas.update()
        with torch.no_grad():
            module(x)
        try:
            module(x)
        except pypipe.InputError as error:
            found += [] if "with static_graph=True, and a schedule has trained it" in str(error) else [str(error)]
        else:
            found.append("a forward outside was not refused")
    stages = [pypipe.PipelineStage(module, replicas.place, 2, CPU, group=replicas.mesh["pp"].get_group())]
    replicas.schedule.close()
    replicas.schedule = pypipe.Schedule1F1B(stages[0], 4, functional.mse_loss, timeout=30)
    replicas.step(5)
    replicas.check_gradients("a step of another schedule")
    replicas.schedule.close()
    return found + replicas.differences


class _Leaves(nn.Module):
    """Leaves a parameter out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.left_out = nn.Linear(4, 4), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def refused(rank: int, size: int, group: Any, what: str) -> str:
    """What a rank raises."""
    mesh = mesh_of(size, 2)
    place, data = mesh["pp"].get_local_rank(), mesh["dp"].get_group()
    linear, leaves = nn.Linear(4, 4), _Leaves()
    module: nn.Module = leaves if what in ("unused", "static graph changes") else linear
    options: dict[str, Any] = {}
    name = "Schedule1F1B"
    if what == "static graph changes":
        options["static_graph"] = True
    if what == "mixed precision":
        from torch.nn.parallel.distributed import _MixedPrecision

        options["mixed_precision"] = _MixedPrecision(torch.float32, torch.float32, torch.float32)
    wrapped = module
    if what == "dualpipe":
        fully_shard(module, mesh=mesh["dp"])
    elif what != "wrapped late":
        wrapped = DistributedDataParallel(module, process_group=data, **options)
    held = [(place, wrapped)]
    if what == "shared":
        name = "ScheduleInterleaved1F1B"
        held = [(place, wrapped), (place + 2, wrapped)]
    if what == "dualpipe":
        name = "ScheduleDualPipe"
        other = nn.Linear(4, 4)
        fully_shard(other, mesh=mesh["dp"])
        held.append((1 - place, other))
    count = 4 if what == "shared" else 2
    stages = [pypipe.PipelineStage(m, piece, count, CPU, group=mesh["pp"].get_group()) for piece, m in held]
    given = stages if len(stages) > 1 else stages[0]
    schedule = getattr(pypipe, name)(given, n_microbatches=2, loss_fn=functional.mse_loss, timeout=30)
    x = torch.ones(4, 4)
    try:
        schedule.step(x, target=x)
        if what == "wrapped late":
            fully_shard(module, mesh=mesh["dp"])
        if what == "unfrozen":
            linear.weight.requires_grad_(False)
        if what == "static graph changes":
            leaves.forward = lambda x: leaves.linear(x) + leaves.left_out.sum()  # type: ignore[method-assign]
        schedule.step(x, target=x)
    except (pypipe.PipelineError, ValueError) as error:
        return str(error)
    finally:
        schedule.close()
    return "nothing was raised"


def among_stages(rank: int, size: int, group: Any, schedule: str, wrapper: str) -> str:
    """What a rank raises where what wraps its stages was told of no group, or of one with another stage's ranks."""
    mesh = mesh_of(size, 2)
    place, everyone = mesh["pp"].get_local_rank(), init_device_mesh("cpu", (size,))

    def wrap(module: nn.Module) -> nn.Module:
        match wrapper:
            case "ddp":
                return DistributedDataParallel(module)
            case "ddp over the pipeline":  # as where the two dimensions of a mesh are confused
                return DistributedDataParallel(module, process_group=mesh["pp"].get_group())
            case "replicate":
                return replicate(module)
            case "replicate on a mesh":
                return replicate(module, device_mesh=everyone)
            case "fsdp":
                fully_shard(module)
                return module
            case "fsdp inside":
                fully_shard(module)
                return nn.Sequential(module, nn.Tanh())
            case "hsdp":
                fully_shard(module, mesh=mesh)
                return module
        return parallelize_module(module, everyone, ColwiseParallel(output_layouts=Replicate()))

    count = transparency.count_stages(schedule, 2)
    held = transparency.pieces_of(schedule, place, 2)
    modules = [wrap(nn.Linear(4, 4)) if number in held else nn.Identity() for number in range(count)]
    stages = [pypipe.PipelineStage(modules[piece], piece, count, CPU, group=mesh["pp"].get_group()) for piece in held]
    given = stages[0] if schedule in transparency.SINGLE else stages
    made = getattr(pypipe, schedule.partition(" ")[0])(given, n_microbatches=2, loss_fn=functional.mse_loss, timeout=30)
    x = torch.ones(4, 4)
    with pytest.raises(pypipe.ConfigurationError) as raised:
        made.step(x, target=x)
    made.close()
    return str(raised.value)


def alone(rank: int, size: int, group: Any) -> list[str]:
    """Groups that are right though they are the default ones, or trivial: pipelines of one rank; a replica alone."""
    found = []
    for pipeline in (1, 2):
        mesh = mesh_of(size, pipeline)
        place = mesh["pp"].get_local_rank()
        module = nn.Linear(4, 4)
        reference = copy.deepcopy(module)
        groups = [dist.new_group([each]) for each in range(size)]
        wrapped = DistributedDataParallel(module, process_group=None if pipeline == 1 else groups[rank])
        reference.load_state_dict(module.state_dict())
        stage = pypipe.PipelineStage(wrapped, place, pipeline, CPU, group=mesh["pp"].get_group())
        schedule = pypipe.Schedule1F1B(stage, 2, functional.mse_loss, timeout=30)
        x = torch.ones(4, 4)
        schedule.step(x, target=x)
        if pipeline == 1:
            functional.mse_loss(reference(x), x).backward()
            if not torch.allclose(grad(module.weight), grad(reference.weight)):
                found.append(f"rank {rank}: other gradients")
        schedule.close()
    return found


def two_copies(rank: int, size: int, group: Any, wrapper: str) -> list[str]:
    """DualPipe's copies are reduced among replicas and added up: each step; two added up; the last one of three."""
    mesh = mesh_of(size, 2)
    place, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    with torch.random.fork_rng([]):
        torch.manual_seed(11)
        pieces = [Piece(wrapper in SPARSE, wrapper == "static_unused").double() for _ in range(2)]
        batches = [torch.randn(2, 2, 6, WIDTH, dtype=torch.float64) for _ in range(9)]
    reference = nn.Sequential(*copy.deepcopy(pieces))
    held = [(piece, wrap(copy.deepcopy(pieces[piece]), wrapper, mesh)) for piece in (place, 1 - place)]
    stages = [pypipe.PipelineStage(module, piece, 2, CPU, group=mesh["pp"].get_group()) for piece, module in held]
    schedule = pypipe.ScheduleDualPipe(stages, 3, functional.mse_loss, timeout=30)
    differences = []

    def zero_grad() -> None:
        for module in (reference, *(module for _, module in held)):
            for parameter in module.parameters():
                parameter.grad = None

    for step, batch in enumerate(batches):
        syncs = step not in (2, 4, 5, 7)
        with no_sync([module for _, module in held]) if not syncs else contextlib.nullcontext():
            schedule.step(batch[replica][0], target=batch[replica][1])
        for x, y in batch:
            for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
                (functional.mse_loss(reference(a), b) / 6).backward()
        if not syncs:
            continue
        for piece, module in held:
            for (name, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
                worst = transparency.difference(a.grad, b.grad)
                if not worst <= transparency.TOLERANCE:
                    differences.append(f"rank {rank}: {name} of stage {piece}, step {step}: {worst:g} off")
        if step in (1, 3, 6):
            zero_grad()
    schedule.close()
    return differences


def traced(rank: int, size: int, group: Any) -> list[str]:
    """The text form of what each rank did, with the reductions."""
    mesh = mesh_of(size, 2)
    place = mesh["pp"].get_local_rank()
    module = nn.Linear(4, 4)
    fully_shard(module, mesh=mesh["dp"])
    stage = pypipe.PipelineStage(module, place, 2, CPU, group=mesh["pp"].get_group())
    schedule = pypipe.Schedule1F1B(stage, 2, functional.mse_loss, timeout=30)
    x = torch.ones(4, 4)
    with schedule.trace() as trace:
        schedule.step(x, target=x)
    dist.barrier(mesh["dp"].get_group())
    lines = [",".join(str(event.action) for event in events) for events in trace.timeline.ranks]
    text = trace.text()
    text_has_both = "U" in text and "R" in text
    program = schedule.program.without_transfers().text().splitlines()
    schedule.close()
    return lines if lines == program and text_has_both else [f"traced {lines}, not {program}:\n{text}"]
