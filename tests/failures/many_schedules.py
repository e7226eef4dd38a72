"""Schedules made and closed, one after another, and what stays of them."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import leftovers
import torch
import torch.distributed as dist
from torch import nn

import pypipe


def growth(rank: int, size: int, group: Any, count: int) -> dict[str, int]:
    """What there is more of after `count` schedules than after three of them."""
    module, x = nn.Linear(4, 4), torch.ones(4, 4)

    def make(times: int) -> Counter[str]:
        for _ in range(times):
            stage = pypipe.PipelineStage(module, rank, size, torch.device("cpu"), group=group)
            with pypipe.Schedule1F1B(stage, 2, nn.functional.mse_loss, timeout=30) as schedule:
                schedule.step(x, target=x)
        dist.barrier(group)
        gc.collect()
        # str(): some types of others' extensions have no name for a module.
        ours = [kind for kind in map(type, gc.get_objects()) if str(kind.__module__).startswith("pypipe")]
        found = leftovers.held() + Counter(f"object {kind.__qualname__}" for kind in ours)
        found["keys in the store"] = dist.distributed_c10d._get_default_store().num_keys()
        dist.barrier(group)
        return found

    before = make(3)
    return dict(make(count) - before)
