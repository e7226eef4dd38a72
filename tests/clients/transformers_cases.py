"""Trains a model of transformers cut by split(), and whole, and compares them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers_models
from transparency import TOLERANCE, V_SHAPED, difference

import pypipe


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """In float64; the models' own is in float32."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def loss_within(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss that the model has computed itself."""
    return loss


def train(rank: int, size: int, group: Any, name: str, schedule_name: str, how: str) -> list[str]:
    """Two optimizer steps; returns what differs from the whole model, in words.

    Args:
        how: "plain"; "loss": the model computes its loss itself; "checkpointing": layers are computed again in the
            backward; "meta": the model is on the meta device, and the weights are loaded by name.
    """
    model = transformers_models.make(name)
    whole = copy.deepcopy(model)
    if how == "checkpointing":
        model.gradient_checkpointing_enable()
    if how == "meta":
        with torch.device("meta"):
            model = transformers_models.make(name)
    stages = pypipe.split(
        model,
        transformers_models.CUTS.get((name, size)),
        group=group,
        placement="v" if schedule_name in V_SHAPED else "loop",
        output=(lambda out: out.loss) if how == "loss" else (lambda out: out.logits),
        example=transformers_models.batch(2),
    )
    found: list[str] = []
    if how == "meta":
        buffers = dict(whole.named_buffers())
        for stage in stages:
            found += stage.submod.load_state_dict(whole.state_dict(), strict=False).missing_keys
            for buffer_name, buffer in stage.submod.named_buffers():
                buffer.copy_(buffers[buffer_name])
    loss_fn, tolerance = (loss_within, 1e-5) if how == "loss" else (loss_of, TOLERANCE)
    schedule: Any = getattr(pypipe, schedule_name)(stages, 3, loss_fn)
    parameters = {
        parameter_name: parameter
        for stage in stages
        for parameter_name, parameter in stage.submod.named_parameters(remove_duplicate=False)
    }
    optimizer = torch.optim.AdamW({id(its): its for its in parameters.values()}.values(), lr=0.01, eps=1e-4)
    of_whole = torch.optim.AdamW(whole.parameters(), lr=0.01, eps=1e-4)
    torch.manual_seed(1)
    for number in range(2):
        batch = transformers_models.batch(6)
        output = whole(**batch)
        loss = output.loss if how == "loss" else loss_of(output.logits, batch["labels"])
        loss.backward()
        losses: list[torch.Tensor] = []
        # Each microbatch has as many rows, so that the mean of their means is the batch's.
        schedule.step(**batch, target=batch["labels"], losses=losses, return_outputs=False)
        theirs = dict(whole.named_parameters(remove_duplicate=False))
        pairs = [(f"gradient of {name}", parameter.grad, theirs[name].grad) for name, parameter in parameters.items()]
        if losses:
            pairs.append(("loss", torch.stack(losses).mean(), loss.detach()))
        for what, mine, other in pairs:
            # A key's bias has no influence on attention: its gradient is nothing but rounding.
            is_noise = mine is not None and other is not None and float(other.abs().max()) < 1e-12
            worst = float((mine - other).abs().max()) if is_noise else difference(mine, other)
            if not worst <= tolerance:
                found.append(f"rank {rank}: {what} in step {number} differs by {worst:g}")
        for each in (optimizer, of_whole):
            each.step()
            each.zero_grad()
    schedule.close()
    return found
