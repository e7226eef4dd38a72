"""Runs beside the cases: a compiled stage, and eval() before, between and after training steps."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from autograd_base import WIDTH, Case, Special, joins, mse, plain_batch
from autograd_runs import copied, note_differences
from models import compiled
from torch import Tensor, nn

import pypipe


def compare_compiled(rank: int, size: int, group: Any) -> list[str]:
    """One stage is compiled; what differs from the same stages in eager mode."""
    found: list[str] = []
    runs = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        module = [made.double() for made in joins(size)][rank]
        called = compiled(module, backend="inductor") if is_compiled and rank == 1 else module
        stage = pypipe.PipelineStage(called, rank, size, torch.device("cpu"), group=group)
        with pypipe.Schedule1F1B(stage, n_microbatches=2, loss_fn=mse, timeout=100) as schedule:
            for _ in range(2):
                batch = plain_batch(6)
                schedule.step(*batch.args, target=batch.target)
        runs.append({name: parameter.grad for name, parameter in module.named_parameters()})
    mine, theirs = runs
    note_differences(f"rank {rank}", Case([]), mine, theirs, found)
    return found


def evaluate(rank: int, size: int, group: Any, order: str, mode: str, name: str) -> list[str]:
    """Training steps with an eval() somewhere; what differs from the same steps without it, or from the model."""
    found: list[str] = []
    torch.manual_seed(0)
    modules = [module.double() for module in joins(size)]
    modules[1] = Special(lambda self, x: (self.norm(x) @ self.w, x, self.p.view(1, WIDTH))).double()
    reference = copy.deepcopy(modules)
    stage = pypipe.PipelineStage(modules[rank], rank, size, torch.device("cpu"), group=group)
    around = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, contextlib.nullcontext)
    batches = [plain_batch(7) for _ in range(2)]
    other = plain_batch(6)

    def model(modules: list[nn.Module], x: Tensor) -> Tensor:
        for module in modules:
            x = module(*x) if isinstance(x, tuple) else module(x)
        return x

    def evaluate_once() -> None:
        before = {name: parameter.grad for name, parameter in modules[rank].named_parameters()}
        kept = copied(before)
        if mode == "module.eval()":
            modules[rank].eval()
        losses: list[Tensor] = []
        with around():
            output = schedule.eval(*other.args, target=other.target, losses=losses)
        modules[rank].train()
        after = {name: parameter.grad for name, parameter in modules[rank].named_parameters()}
        if any(after[name] is not before[name] for name in before):
            found.append(f"rank {rank}: eval() replaced a gradient")
        note_differences(f"rank {rank}, gradients after eval()", Case([]), copied(after), kept, found)
        if rank == size - 1:
            expected, expected_losses = [], []
            for module in reference:
                module.train(mode != "module.eval()")
            with torch.no_grad():
                for x, y in zip(torch.tensor_split(other.args[0], 3), torch.tensor_split(other.target, 3), strict=True):
                    expected.append(model(reference, x))
                    expected_losses.append(mse(expected[-1], y))
            for module in reference:
                module.train()
            note_differences(
                f"rank {rank}, eval()", Case([]), {"output": output, "losses": losses},
                {"output": torch.cat(expected), "losses": expected_losses}, found,
            )  # fmt: skip
            if output.requires_grad or (mode != "inference_mode" and output.is_inference()):
                found.append("the output of eval() is no plain tensor")
        elif output is not None or losses:
            found.append(f"rank {rank} got an output")

    with getattr(pypipe, name)(stage, n_microbatches=3, loss_fn=mse, timeout=10) as schedule:
        for step, batch in enumerate(batches):
            if order == "eval first" or (order == "eval between" and step):
                evaluate_once()
            schedule.step(*batch.args, target=batch.target)
            for x, y in zip(torch.tensor_split(batch.args[0], 3), torch.tensor_split(batch.target, 3), strict=True):
                mse(model(reference, x), y).backward(torch.tensor(len(x) / 7, dtype=torch.float64))
        if order == "eval last":
            evaluate_once()
            evaluate_once()
    mine = {name: parameter.grad for name, parameter in modules[rank].named_parameters()}
    theirs = {name: parameter.grad for name, parameter in reference[rank].named_parameters()}
    note_differences(f"rank {rank}", Case([]), copied(mine), copied(theirs), found)
    return found
