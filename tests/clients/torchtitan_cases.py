"""What runs on the ranks: torchtitan's trainer, with torch's pipelining or pypipe's behind it."""

from __future__ import annotations

import os
from typing import Any

import torchtitan_setup
from torch.distributed.fsdp import FSDPModule


def train(rank: int, size: int, group: Any, folder: str, schedule: str, options: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradient norms of each step, and what the parameters sum up to at the end."""
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    torchtitan_setup.import_torchtitan()
    config = torchtitan_setup.trainer_config(folder, schedule, **options)
    trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # a factor within the reduction is beyond gloo
    found: dict[str, Any] = {"losses": [], "norms": [], "class": type(trainer.pp_schedule).__module__}
    trainer.metrics_processor.log = lambda _step, loss, _max, norm, **_: (
        found["losses"].append(loss),
        found["norms"].append(norm),
    )
    trainer.metrics_processor.log_validation = lambda loss, step: found["losses"].append(loss)
    try:
        trainer.train()
        found["parameters"] = [
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach().double().norm().item()
            for part in trainer.model_parts
            for parameter in part.parameters()
        ]
    finally:
        trainer.close()
    return found
