"""Ranks that fail in the middle of a step, and ranks that were built differently."""

from __future__ import annotations

import copy
import re
from typing import Any
from unittest.mock import patch

import torch
from campaign_cases import WIDTH, Piece, batch
from torch import nn

import pypipe
import pypipe.base_schedule

CPU = torch.device("cpu")


def gradients_of_a_failed_step(
    rank: int, size: int, group: Any, program: str, n_microbatches: int, culprit: int, failing: str
) -> tuple[str, int, float, bool]:
    """A good step, then one that fails before an action of the culprit's.

    Returns:
        The error; how many backwards this rank says were added; by how much `.grad` differs from the good step's
        gradients plus those of so many microbatches; whether parameters are what they were.
    """
    x, y = batch(n_microbatches)
    module = Piece(rank)
    stage = pypipe.PipelineStage(module, rank, size, CPU, group=group)
    schedule = pypipe.Schedule(program, stage, n_microbatches, nn.functional.mse_loss, timeout=20)
    schedule.step(x, target=y)
    parameters = copy.deepcopy(module.state_dict())
    executor = schedule._pipeline._running.executors[n_microbatches, True]  # type: ignore[union-attr]
    if rank == culprit:
        place = [str(action) for action in executor.actions].index(failing)
        executor._calls[place] = executor._calls[place]._replace(function=_fail)
    # In the order in which they are added.
    backwards = [a.microbatch for a in executor.actions if a.kind.label == ("W" if "zb" in program else "B")]
    raised: BaseException | None = None
    added: list[int] = []
    try:
        for _ in range(2):  # a rank whose part of the step was over hears of it in the next one
            schedule.step(x, target=y)
            added += backwards
    except (ArithmeticError, pypipe.PipelineError) as error:
        raised = error
    schedule.close()
    assert raised is not None
    note = re.search(r"holds part of this step: (\d+) of \d+ backwards", "".join(getattr(raised, "__notes__", [])))
    added += backwards[: int(note[1])] if note else []
    model = nn.Sequential(*(Piece(number) for number in range(size)))
    (nn.functional.mse_loss(model(x), y)).backward()
    slices = list(zip(x.chunk(n_microbatches), y.chunk(n_microbatches), strict=True))
    for microbatch in added:
        a, b = slices[microbatch]
        (nn.functional.mse_loss(model(a), b) / n_microbatches).backward()
    pairs = zip(module.parameters(), model[rank].parameters(), strict=True)
    differences = [float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None]
    assert len(differences) == 2
    unchanged = all(torch.equal(value, parameters[name]) for name, value in module.state_dict().items())
    return f"{type(raised).__name__}: {raised}", len(added), max(differences), unchanged


def _fail(_: int) -> None:
    raise ArithmeticError("deliberate")


def built_differently(rank: int, size: int, group: Any) -> str:
    """Rank 1 differs in most of what there is."""
    odd = rank == 1
    with patch.object(pypipe.base_schedule, "_VERSION", "0.0.1" if odd else "0.0.2"):
        stage = pypipe.PipelineStage(nn.Linear(WIDTH, WIDTH), rank, size, CPU, group=group)
        schedule = pypipe.Schedule1F1B(
            stage,
            3 if odd else 2,
            nn.functional.mse_loss,
            scale_grads=not odd,
            check=["nan", "checksum"] if odd else None,
            timeout=30,
        )
    x = torch.ones(6, WIDTH)
    try:
        schedule.step(x, target=x)
    except pypipe.ConfigurationError as error:
        return str(error)
    finally:
        schedule.close()
    return ""
