"""Hooks of accumulated gradients in a pipeline, and in one backward of the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transparency
from models import make, twins, unpipelined
from torch import Tensor, nn


def _listen(modules: list[nn.Module], updates: bool) -> list[tuple[int, Tensor]]:
    """Notes each gradient when it is there, by the parameter's number; and makes an optimizer's step of it at once."""
    noted: list[tuple[int, Tensor]] = []
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    for number, parameter in enumerate(parameters):

        def hook(p: Tensor, number: int = number) -> None:
            assert p.grad is not None
            assert not torch.is_grad_enabled()
            noted.append((number, p.grad.clone()))
            if updates:
                p.sub_(p.grad, alpha=0.1)
                p.grad = None

        parameter.register_post_accumulate_grad_hook(hook)
    return noted


def compare(rank: int, size: int, group: Any, name: str, updates: bool) -> list[str]:
    """Two steps; every parameter's hook runs once a step, with the batch's gradient."""
    modules, make_batch, loss_fn = make("mlp", transparency.count_stages(name, size))
    reference = twins(modules)
    schedule, held = transparency.build(rank, size, group, name, modules, 4, loss_fn=loss_fn, timeout=30)
    noted = _listen([module for _, module in held], updates)
    theirs = _listen([reference[piece] for piece, _ in held], updates)
    for piece, module in enumerate(reference):
        if piece not in [number for number, _ in held]:
            _listen([module], updates)
    differences: list[str] = []
    for step in range(2):
        x, y = make_batch(9)
        schedule.step(x, target=y)
        loss_fn(unpipelined(reference, x), y).backward()
        mine, others = dict(noted), dict(theirs)
        if len(noted) != len(mine) or sorted(mine) != sorted(others):
            differences.append(f"rank {rank}, step {step}: hooks ran for {[n for n, _ in noted]}, not {sorted(others)}")
        for number in sorted(mine.keys() & others.keys()):
            worst = transparency.difference(mine[number], others[number])
            if not worst <= transparency.TOLERANCE:
                differences.append(f"rank {rank}, step {step}: hook of parameter {number} saw {worst:g} off")
        noted.clear()
        theirs.clear()
    for piece, module in held:
        for (entry, a), b in zip(module.state_dict().items(), reference[piece].state_dict().values(), strict=True):
            worst = transparency.difference(a, b)
            if not worst <= transparency.TOLERANCE:
                differences.append(f"rank {rank}: {entry} of stage {piece} differs by {worst:g}")
    schedule.close()
    return differences


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("no")
        return self.linear(x)


def after_a_failure(rank: int, size: int, group: Any) -> list[int]:
    """Hooks that a failed step has set aside are back, and have not run."""
    module = _Fails() if rank == size - 1 else nn.Linear(4, 4)
    calls: list[int] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    schedule, _ = transparency.build(
        rank,
        size,
        group,
        "Schedule1F1B",
        [copy.deepcopy(module) if i != rank else module for i in range(size)],
        4,
        loss_fn=nn.functional.mse_loss,
        timeout=30,
    )
    try:
        schedule.step(torch.ones(8, 4), target=torch.ones(8, 4))
    except Exception:
        calls.append(len(calls))
    schedule.close()
    module.calls = 10
    module(torch.ones(1, 4)).sum().backward()
    return calls
