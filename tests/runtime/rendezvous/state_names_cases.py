"""Stages with keys in common, and what the first step says of that."""

from __future__ import annotations

import sys
import warnings
from typing import Any
from unittest.mock import patch

import torch
import transparency
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pypipe import NameClashWarning
from pypipe.runtime.rendezvous import state_names


class Apart(nn.Module):
    """A stage whose keys are its own: a parameter of each stage's name, and optionally one that all have."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.stack(list(self.parameters())).sum()


def _modules(kind: str, count: int, group: Any) -> list[nn.Module]:
    if kind == "alike":
        return [nn.Sequential(nn.Linear(4, 4)) for _ in range(count)]
    if kind == "large":  # more keys than a config has; the stages have all of them in common
        return [Apart([f"p{i}" for i in range(1000)]) for _ in range(count)]
    if kind == "wrapped":  # in two ways, and one that torch.distributed.checkpoint sees through
        plain = [nn.Sequential(nn.Linear(4, 4)) for _ in range(count)]
        compiled: Any = torch.compile(plain[0], backend="eager")
        return [compiled, DistributedDataParallel(plain[1], process_group=group)]
    if kind == "renamed":
        made: list[nn.Module] = []
        for number in range(count):
            module = nn.Linear(4, 4)

            def rename(_: Any, state: dict[str, Any], prefix: str, __: Any, number: int = number) -> None:
                for key in list(state):
                    state[f"stages.{number}.{key}"] = state.pop(key)

            module.register_state_dict_post_hook(rename)
            made.append(module)
        return made
    common = ["shared"] if kind == "one" else []
    return [Apart([f"stage{number}", *common]) for number in range(count)]


def warned(rank: int, size: int, group: Any, name: str, kind: str, steps: int) -> list[list[tuple[str, str]]]:
    """For each step of a script that has imported torch.distributed.checkpoint: text and file of each warning."""
    modules = _modules(kind, transparency.count_stages(name, size), group)
    schedule, _ = transparency.build(rank, size, group, name, modules, 2, loss_fn=nn.functional.mse_loss, timeout=30)
    found: list[list[tuple[str, str]]] = []
    imported = {"torch.distributed.checkpoint": sys}  # it is looked for, not used
    with schedule, patch.object(state_names, "_warned", False), patch.dict(sys.modules, imported):
        for _ in range(steps):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
            found.append([(str(each.message), each.filename) for each in caught if each.category is NameClashWarning])
    return found
