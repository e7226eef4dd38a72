"""Runs that stop at a checkpoint and go on from it at another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as _checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pypipe import PipelineStage, Schedule1F1B, ScheduleDualPipe, ScheduleInterleaved1F1B, checkpoint

STEPS = 3
dcp: Any = _checkpoint  # it exports no names, as mypy sees it
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _blocks() -> nn.Sequential:
    """Six blocks with parameters, one of which is frozen, and two without: at P=4 the last stage has none."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)] + [nn.Sequential(nn.Tanh())] * 2
    model = nn.Sequential(*blocks).double()
    model[1][0].bias.requires_grad_(False)  # type: ignore[index]
    return model


def _optimizer(kind: str, module: nn.Module) -> Any:
    named = list(module.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "lr": 0.02},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return (torch.optim.AdamW if kind == "adam" else torch.optim.NAdam)(groups, lr=0.05)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = (torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


class Run:
    """A model at one layout.

    "1f1b" with as many stages as ranks, "interleaved", "sharded" (P=2, 2 shards), "dualpipe", or "whole".
    """

    def __init__(self, layout: str, kind: str, rank: int, size: int, group: Any) -> None:
        self.layout = layout
        self.process_group = group  # of all ranks that take part: the pool may have more
        whole: Any = _blocks()
        self.rows = slice(None)
        if layout == "whole":
            self.module: nn.Module = whole
            self.optimizer = _optimizer(kind, whole)
            return
        count = {"1f1b": size, "interleaved": 2 * size, "sharded": 2, "dualpipe": size}[layout]
        indices = [rank, rank + size] if layout == "interleaved" else [rank]
        if layout == "dualpipe":
            indices = [rank, size - 1 - rank]
        if layout == "sharded":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
            group, indices = mesh["pp"].get_group(), [mesh["pp"].get_local_rank()]
            shard = mesh["dp"].get_local_rank()
            self.rows = slice(4 * shard, 4 * shard + 4)
        width = 8 // count
        stages, modules = [], []
        for index in indices:
            module = nn.Sequential(*whole[index * width : (index + 1) * width])
            if layout == "sharded":
                fully_shard(module, mesh=mesh["dp"])
            prefix = {str(i): str(index * width + i) for i in range(width)}
            stages.append(PipelineStage(module, index, count, torch.device("cpu"), group=group, prefix=prefix))
            modules.append(module)
        self.module = nn.ModuleList(modules)
        self.optimizer = _optimizer(kind, self.module)
        several: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "dualpipe": ScheduleDualPipe}
        cls: Any = several.get(layout, Schedule1F1B)
        given: Any = stages if layout in several else stages[0]
        self.schedule = cls(given, 4, loss_fn=nn.functional.mse_loss, timeout=60)
        self.stages = stages

    def train(self, first: int, steps: int = STEPS) -> None:
        for step in range(first, first + steps):
            x, y = (part[self.rows] for part in _batch(step))
            if self.layout == "whole":
                nn.functional.mse_loss(self.module(x), y).backward()
            else:
                self.schedule.step(x, target=y)
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def save(self, folder: str) -> None:
        if self.layout == "whole":
            model, optimizer = get_state_dict(self.module, self.optimizer, options=_FLAT)
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)
        else:
            state = checkpoint.get_state(self.schedule, self.optimizer, extra={"step": 3})
            dcp.save(state, checkpoint_id=folder, process_group=self.process_group)

    def load(self, folder: str, extra: bool) -> None:
        if self.layout == "whole":
            model, optimizer = get_state_dict(self.module, self.optimizer, options=_FLAT)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)
            set_state_dict(
                self.module, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=_FLAT
            )
            return
        state = checkpoint.get_state(self.schedule, self.optimizer, extra={"step": 0} if extra else None)
        dcp.load(state, checkpoint_id=folder, process_group=self.process_group)
        if extra:
            assert state["extra"]["step"] == 3
        checkpoint.set_state(self.schedule, state, self.optimizer)

    def values(self) -> dict[str, Tensor]:
        if self.layout == "whole":
            return {name: p.detach().clone() for name, p in self.module.named_parameters()}
        found = {}
        for stage in self.stages:
            names = stage.global_names()
            for local, p in stage.submod.named_parameters():
                value = p.detach()
                found[names[local]] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
        return found

    def close(self) -> None:
        if self.layout != "whole":
            self.schedule.close()


def saved(rank: int, size: int, group: Any, layout: str, kind: str, folder: str, steps: int = STEPS) -> None:
    """Trains from the start, and saves."""
    run = Run(layout, kind, rank, size, group)
    run.train(0, steps)
    run.save(folder)
    run.close()


def gone_on(
    rank: int, size: int, group: Any, layout: str, kind: str, folder: str, first: int = STEPS, extra: bool = True
) -> float:
    """Loads into a new model, saves and loads again, goes on, and compares with a run that was never stopped."""
    run = Run(layout, kind, rank, size, group)
    with torch.no_grad():
        for p in run.module.parameters():
            p.zero_()
    run.load(folder, extra)
    again = str(Path(folder) / "again")
    run.save(again)
    run.load(again, extra)
    run.train(first)
    whole = Run("whole", kind, 0, 1, None)
    whole.train(0, first + STEPS)
    expected, worst = whole.values(), 0.0
    for name, value in run.values().items():
        worst = max(worst, (value - expected[name]).abs().max().item())
    run.close()
    return worst


def refused(rank: int, size: int, group: Any, case: str) -> str:
    """The text of the error of one wrong call."""
    module = nn.Sequential(nn.Linear(4, 4))
    prefix = None if case == "clash" else f"layers.{rank}."
    stage = PipelineStage(module, rank, size, torch.device("cpu"), group=group, prefix=prefix)
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss, timeout=30)
    with schedule:
        try:
            optimizer = torch.optim.Adam(module.parameters())
            if case == "foreign" and rank == 0:
                optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})
            state = checkpoint.get_state(schedule, optimizer)
            if case == "missing" and rank == 1:
                del state["model"]["layers.1.0.weight"]
            if case == "unexpected":
                state["model"]["other.weight"] = torch.zeros(1)
            if case == "shape" and rank == 0:
                state["model"]["layers.0.0.weight"] = torch.zeros(3, 3)
            if case == "moment" and rank == 0:
                state["optimizer"]["state.layers.0.0.weight.exp_avg"] = torch.zeros(3, 3)
            checkpoint.set_state(schedule, state, optimizer)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def alone(rank: int, size: int, group: Any) -> str:
    """Only rank 0 asks for the state."""
    stage = PipelineStage(nn.Linear(2, 2), rank, size, torch.device("cpu"), group=group, prefix=f"layers.{rank}")
    with Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss, timeout=0.5) as schedule:
        if rank == 0:
            try:
                checkpoint.get_state(schedule)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return ""
