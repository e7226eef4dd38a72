"""What each rank raises where a model cannot be cut, and whether the ranks train another one afterwards."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transparency
from refused_models import CASES, MAKERS
from splitting_models import WIDTH

import pypipe


def attempt(rank: int, size: int, group: Any, case: str) -> tuple[str, list[str], list[str]]:
    """What this rank raises; what is wrong with the model afterwards; and with a pipeline of another one."""
    name, options, _ = CASES[case]
    torch.manual_seed(0)
    model = MAKERS[name]()
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    raised = "nothing"
    try:
        pypipe.split(model, **{"example": torch.ones(2, WIDTH), **options}, group=group)
    except pypipe.PipelineError as error:
        raised = f"{type(error).__name__}: {error}"
    after = model.state_dict()
    changed = [key for key, value in before.items() if not torch.equal(value, after[key])]
    changed += [] if torch.equal(random, torch.get_rng_state()) else ["the random numbers"]
    return raised, changed, transparency.compare(rank, size, group, "Schedule1F1B", "mlp", 2, 5, True)
