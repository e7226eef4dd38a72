"""Stages that keep their inputs, beyond their backward and for other microbatches."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import transparency
from torch import Tensor, nn
from torch.nn import functional

import pypipe
from pypipe.runtime.transport.inputs import WatchedInputs

WIDTH = 5


class Keeper(nn.Module):
    """Adds what it has kept of its last input, if it keeps any."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.kind, self.keeps = kind, True
        self.last: Tensor | None = None
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.last is not None:
            y = y + self.last
        if self.keeps:
            match self.kind:
                case "detached":
                    self.last = x.detach()
                case "view":
                    self.last = x.detach()[:, :1]
                case "itself":
                    self.seen.append((x, x.detach().clone()))
                case "numpy":
                    self.seen.append((torch.from_numpy(x.detach().numpy()), x.detach().clone()))
        return y

    def check(self) -> list[str]:
        """Whether what it has kept is still what it was."""
        return [] if all(torch.equal(kept, was) for kept, was in self.seen) else ["what a stage has kept has changed"]


def _run(modules: Sequence[nn.Module], x: Tensor, y: Tensor, count: int) -> Tensor:
    """One microbatch after another through the model."""
    outputs = []
    for a, b in zip(x.chunk(count), y.chunk(count), strict=True):
        for module in modules:
            a = module(a)
        if torch.is_grad_enabled():
            (functional.mse_loss(a, b) / count).backward()
        outputs.append(a.detach())
    return torch.cat(outputs)


def kept(rank: int, size: int, group: Any, name: str, kind: str, link: str, from_step: int) -> list[str]:
    """Two steps and two evals; what differs from the model without a pipeline, or the error's text."""
    count = transparency.count_stages(name, size)
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        modules = [Keeper(kind) for _ in range(count)]
        batches = torch.randn(4, 2, 8, WIDTH, dtype=torch.float64)
    reference = copy.deepcopy(modules)
    with patch.dict(os.environ, {"PYPIPE_LINK": link}):
        schedule, held = transparency.build(
            rank, size, group, name, list(modules), 4, loss_fn=functional.mse_loss, timeout=30
        )  # fmt: skip
        found: list[str] = []
        try:
            for step, (x, y) in enumerate(batches):
                for module in [*modules, *reference]:
                    module.keeps = step >= from_step
                if step < 2:
                    schedule.step(x, target=y)
                    _run(reference, x, y, 4)
                else:
                    output = schedule.eval(x)
                    with torch.no_grad():
                        expected = _run(reference, x, y, 4)
                    if output is not None and transparency.difference(output, expected) > transparency.TOLERANCE:
                        found.append(f"rank {rank}: the output of step {step} differs")
        except pypipe.PipelineError as error:
            return [str(error)]
        for piece, mine in held:
            assert isinstance(mine, Keeper)
            found += mine.check()
            for (parameter, a), b in zip(mine.named_parameters(), reference[piece].parameters(), strict=True):
                if not transparency.difference(a.grad, b.grad) <= transparency.TOLERANCE:
                    found.append(f"rank {rank}: gradient of {parameter}, stage {piece}, differs")
        schedule.close()
    return found


def lent(rank: int, size: int, group: Any, name: str, model: str) -> list[bool]:
    """For each stage that receives from another rank, whether it gets copies after its first step and eval."""
    schedule, make_batch = _ordinary(rank, size, group, name, model)
    x, y = make_batch(8)
    for _ in range(2):
        schedule.step(x, target=y)
        schedule.eval(x)
    stages = schedule._pipeline._running.stages.values()
    copies = [stage._inputs._copies or bool(stage._inputs._tries) for stage in stages if _is_watched(stage)]
    schedule.close()
    return copies


def _is_watched(stage: Any) -> bool:
    return isinstance(stage._inputs, WatchedInputs)


def _ordinary(rank: int, size: int, group: Any, name: str, model: str) -> tuple[Any, Any]:
    from models import make

    modules, make_batch, loss_fn = make(model, transparency.count_stages(name, size))
    schedule, _ = transparency.build(rank, size, group, name, modules, 4, loss_fn=loss_fn, timeout=30)
    return schedule, make_batch
