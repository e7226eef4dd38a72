"""Steps that are given microbatches, or another number of them than the schedule was built with."""

from __future__ import annotations

import os
from typing import Any

import torch
import transparency
from models import make, twins, unpipelined
from torch import Tensor, nn

import pypipe

ROWS = [3, 1, 4, 2, 5, 1, 2, 3]  # of pre-split microbatches


def _differences(what: str, held: Any, reference: list[nn.Module]) -> list[str]:
    found = []
    for piece, module in held:
        for (name, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
            worst = transparency.difference(a.grad, b.grad)
            if not worst <= transparency.TOLERANCE:
                found.append(f"{what}: gradient of {name} of stage {piece} differs by {worst:g}")
            a.grad = b.grad = None
    return found


def change(rank: int, size: int, group: Any, name: str, built: int, counts: list[int], **options: Any) -> list[str]:
    """A step and an eval for each of these numbers of microbatches; returns what differs from no pipeline."""
    modules, make_batch, loss_fn = make("mlp", transparency.count_stages(name, size))
    reference = twins(modules)
    schedule, held = transparency.build(rank, size, group, name, modules, built, loss_fn=loss_fn, timeout=30, **options)
    has_last = any(piece == len(modules) - 1 for piece, _ in held)
    found = []
    for count in counts:
        x, y = make_batch(2 * count + 1)
        losses: list[Tensor] = []
        output = schedule.step(x, target=y, losses=losses, n_microbatches=count)
        expected = unpipelined(reference, x)
        loss_fn(expected, y).backward()
        if has_last:
            if len(losses) != count:
                found.append(f"M = {count}: {len(losses)} losses")
            if not torch.allclose(output, expected, rtol=1e-12, atol=1e-13):
                found.append(f"M = {count}: outputs differ")
        found += _differences(f"M = {count}", held, reference)
        evaluated = schedule.eval(x, n_microbatches=count)
        if has_last and not torch.allclose(evaluated, expected, rtol=1e-12, atol=1e-13):
            found.append(f"M = {count}: outputs of eval() differ")
    if schedule.program.n_microbatches != counts[-1]:
        found.append(f"the schedule's program has {schedule.program.n_microbatches} microbatches")
    schedule.close()
    return found


def split(rank: int, size: int, group: Any, name: str, scale_grads: bool) -> list[str]:
    """Microbatches of differing lengths, given as lists."""
    modules, make_batch, loss_fn = make("mlp", transparency.count_stages(name, size))
    reference = twins(modules)
    schedule, held = transparency.build(
        rank, size, group, name, modules, 2, loss_fn=loss_fn, scale_grads=scale_grads, timeout=30
    )
    has_last = any(piece == len(modules) - 1 for piece, _ in held)
    x, y = make_batch(sum(ROWS))
    xs, ys = x.split(ROWS), y.split(ROWS)
    found = []
    for _ in range(2):
        losses: list[Tensor] = []
        outputs = schedule.step(
            arg_mbs=[(each,) for each in xs], target_mbs=list(ys), losses=losses, n_microbatches=len(ROWS)
        )
        each_loss = [loss_fn(unpipelined(reference, a), b) for a, b in zip(xs, ys, strict=True)]
        if scale_grads:
            loss_fn(unpipelined(reference, x), y).backward()
        else:
            torch.stack(each_loss).sum().backward()
        found += _differences("pre-split", held, reference)
        evaluated = schedule.eval(arg_mbs=[(each,) for each in xs], target_mbs=list(ys))
        if has_last:
            for got in (outputs, evaluated):
                expected = [unpipelined(reference, each) for each in xs]
                if not all(torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(got, expected, strict=True)):
                    found.append("outputs differ")
            if not torch.allclose(torch.stack(losses), torch.stack(each_loss).detach(), rtol=1e-12):
                found.append("losses differ")
        elif outputs is not None:
            found.append(f"rank {rank} got outputs")
    schedule.close()
    return found


def disagree(rank: int, size: int, group: Any, name: str, counts: list[int], trained: int, eval_: bool) -> str:
    """After some steps that all ranks agree about, each cuts its batch into another number of microbatches."""
    modules, make_batch, loss_fn = make("mlp", transparency.count_stages(name, size))
    schedule, _ = transparency.build(rank, size, group, name, modules, 4, loss_fn=loss_fn, timeout=60)
    x, y = make_batch(16)
    for _ in range(trained):
        schedule.step(x, target=y)
    try:
        for _ in range(3):  # a first rank may have been through with an eval when others notice
            (schedule.eval if eval_ else schedule.step)(x, target=y, n_microbatches=counts[rank])
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        schedule.__exit__(ValueError, ValueError("the test is over"), None)
    return ""


def refused(rank: int, size: int, group: Any, case: str) -> str:
    """A call that cannot work, on every rank; then one that does, where the schedule can go on."""
    modules, make_batch, loss_fn = make("mlp", size)
    x, y = make_batch(8)
    calls: dict[str, dict[str, Any]] = {
        "both": {"arg_mbs": [(x,)], "target": y},
        "lengths": {"arg_mbs": [(x,), (x,)], "target_mbs": [y]},
        "tuples": {"arg_mbs": [x, x], "target_mbs": [y, y]},
        "empty": {"arg_mbs": [], "target_mbs": []},
        "number": {"arg_mbs": [(x,)], "target_mbs": [y], "n_microbatches": 2},
        "zero": {"n_microbatches": 0},
        "rowless": {"arg_mbs": [(x,), (x[:0],)], "target_mbs": [y, y[:0]]},
        "tensor": {"arg_mbs": x, "target_mbs": [y]},
        "rows": {"arg_mbs": [(x[:4],), (x[4:],)], "target_mbs": [y[:3], y[3:]]},
        "ragged": {"arg_mbs": [(x[:2],), (x[2:],)]} if rank == 0 else {"target": y, "n_microbatches": 2},
    }
    stage = pypipe.PipelineStage(modules[rank], rank, size, torch.device("cpu"), group=group)
    if case == "program":
        from pypipe.program import build

        schedule: Any = pypipe.Schedule(build("1f1b", size, 4), stage, 4, loss_fn, timeout=30)
        call: dict[str, Any] = {"n_microbatches": 2, "target": y}
        args: tuple[Any, ...] = (x,)
    else:
        schedule = pypipe.Schedule1F1B(stage, 4, loss_fn, timeout=30)
        args, call = (), calls[case]
    try:
        schedule.step(*args, **call)
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        schedule.__exit__(ValueError, ValueError("the test is over"), None)
    return ""


def change_over(rank: int, size: int, group: Any, link: str, name: str, counts: list[int]) -> list[str]:
    """As change(), over a link of this name."""
    os.environ["PYPIPE_LINK"] = link
    try:
        return change(rank, size, group, name, 4, counts)
    finally:
        del os.environ["PYPIPE_LINK"]
