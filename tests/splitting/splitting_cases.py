"""Trains a model cut by split() and the whole model on rank processes, and compares them."""

from __future__ import annotations

import copy
from typing import Any

import splitting_models
import torch
from data_parallel_cases import mesh_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transparency import TOLERANCE, V_SHAPED, difference

import pypipe

SINGLE = ["ScheduleGPipe", "Schedule1F1B", "ScheduleZBH1", "ScheduleZBH2"]


def placement_of(schedule: str) -> str:
    """Where a schedule has its stages."""
    if schedule in V_SHAPED:
        return "v"
    return "bidirectional" if schedule == "ScheduleDualPipe" else "loop"


def train(
    rank: int,
    size: int,
    group: Any,
    model: str,
    schedule_name: str,
    stages: int,
    n_microbatches: int = 4,
    rows: int = 9,
    how: str = "",
) -> list[str]:
    """Two optimizer steps and an eval; returns what differs from the whole model, in words.

    Args:
        how: "first": only the first and the last rank are given anything; "meta": the model is on the meta device, and
            the stages load their weights by name.
    """
    example = splitting_models.make(model)
    reference = copy.deepcopy(example.model)
    given = example.model
    if how == "meta":
        given = copy.deepcopy(given).to("meta")
    args, kwargs, _ = example.batch(2)
    made = pypipe.split(
        given,
        {"names": "blocks", "list": getattr(given, "blocks", None)}.get(how, example.cuts[stages]),
        group=group,
        placement=placement_of(schedule_name),
        output=example.output,
        example=(args, kwargs),
        device="cpu",
    )
    found: list[str] = []
    if how == "meta":
        state = reference.state_dict()
        for stage in made:
            unknown = stage.submod.load_state_dict({**state}, strict=False).missing_keys
            found += [f"rank {rank}: {unknown} are in no state"] * bool(unknown)
            buffers = dict(reference.named_buffers())
            for name, buffer in stage.submod.named_buffers():
                buffer.copy_(buffers[name])
    schedule: Any = getattr(pypipe, schedule_name)(
        made[0] if schedule_name in SINGLE else made, n_microbatches=n_microbatches, loss_fn=example.loss, timeout=30
    )
    parameters = {name: p for stage in made for name, p in stage.submod.named_parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.01, eps=1e-4)
    of_reference = torch.optim.AdamW(reference.parameters(), lr=0.01, eps=1e-4)
    is_last = any(stage.is_last for stage in made)
    torch.manual_seed(1)

    def check(what: str, a: Any, b: Any) -> None:
        worst = difference(a, b)
        if not worst <= TOLERANCE:
            found.append(f"rank {rank}: {what} differs by {worst:g}")

    for number in range(2):
        args, kwargs, target = example.batch(rows + number)
        output = reference(*args, **kwargs)
        output = output if example.output is None else example.output(output)
        loss = example.loss(output, target)
        loss.backward()
        losses: list[torch.Tensor] = []
        has_input, has_target = how != "first" or any(stage.is_first for stage in made), how != "first" or is_last
        result = schedule.step(
            *(args if has_input else ()),
            **(kwargs if has_input else {}),
            target=target if has_target else None,
            losses=losses if has_target else None,
        )
        if is_last:
            check(f"output of step {number}", result, output.detach())
            parts = [len(part) for part in torch.tensor_split(target, n_microbatches)]
            mean = sum(part * mine for part, mine in zip(parts, losses, strict=True)) / sum(parts)
            check(f"loss of step {number}", mean, loss.detach())
        theirs = dict(reference.named_parameters())
        for name, parameter in parameters.items():
            check(f"gradient of {name} in step {number}", parameter.grad, theirs[name].grad)
        for each in (optimizer, of_reference):
            each.step()
            each.zero_grad()
    for module in [reference, *(stage.submod for stage in made)]:
        module.eval()
    args, kwargs, _ = example.batch(rows)
    result = schedule.eval(*args, **kwargs)
    if is_last:
        output = reference(*args, **kwargs)
        output = output if example.output is None else example.output(output)
        check("output of the eval", result, output.detach())
    names = {name for name, _ in reference.named_parameters()}
    found += [f"rank {rank}: {name} is no parameter of the model" for name in parameters if name not in names]
    schedule.close()
    everyone: list[Any] = [None] * size
    torch.distributed.all_gather_object(everyone, list(parameters), group=group)
    held = {name for each in everyone for name in each}
    found += [f"no stage has {name}" for name in names - held]
    return found


def train_replicas(rank: int, size: int, group: Any, schedule_name: str, wrapper: str) -> list[str]:
    """One step of two pipelines beside each other; returns how gradients differ from the whole model's."""
    mesh = mesh_of(size, 2)
    example = splitting_models.make("chain")
    reference = copy.deepcopy(example.model)
    count = 4 if schedule_name in V_SHAPED else 2
    args, _, _ = example.batch(2)
    stages = pypipe.split(
        example.model,
        example.cuts[count],
        group=mesh["pp"].get_group(),
        placement=placement_of(schedule_name),
        example=args,
    )
    modules = [stage.submod for stage in stages]
    for stage in stages:
        if wrapper == "ddp":
            stage.submod = DistributedDataParallel(stage.submod, process_group=mesh["dp"].get_group())
            continue
        for module in list(stage.submod.modules()):
            if isinstance(module, splitting_models.Block) and any(True for _ in module.parameters()):
                fully_shard(module, mesh=mesh["dp"])
        fully_shard(stage.submod, mesh=mesh["dp"])
    schedule = getattr(pypipe, schedule_name)(stages, n_microbatches=4, loss_fn=example.loss, timeout=30)
    torch.manual_seed(1)
    found = []
    for number in range(2):
        batches = [example.batch(8) for _ in range(2)]
        args, _, target = batches[mesh["dp"].get_local_rank()]
        schedule.step(*args, target=target)
        for args, _, target in batches:
            (example.loss(reference(*args), target) / 2).backward()
        theirs = dict(reference.named_parameters())
        for module in modules:
            for name, parameter in module.named_parameters():
                mine: Any = parameter.grad
                mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
                worst = difference(mine, theirs[name].grad)
                if not worst <= TOLERANCE:
                    found.append(f"rank {rank}: gradient of {name} in step {number} differs by {worst:g}")
    schedule.close()
    return found
