"""GradScaler over the stages of a pipeline, against torch.amp.GradScaler over the whole model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import transparency
from data_parallel_cases import Case, Replicas
from model_copies_cases import WIDTH, LossWithParameters
from models import Block, unpipelined
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import pypipe

INFINITIES = {1: 0, 4: 1, 6: -1}  # step: which stage overflows
FROZEN_FROM = 5


def own_backward(output: Tensor, target: Tensor) -> Tensor:
    """A loss function that walks its graph by itself."""
    with torch.enable_grad():
        leaf = output.detach().requires_grad_()
        loss = functional.mse_loss(leaf, target)
        loss.backward()
    if output.requires_grad:
        output.backward(leaf.grad)
    return loss.detach()


def _poison(module: nn.Module) -> None:
    gradient = next(module.parameters()).grad
    assert gradient is not None
    gradient.view(-1)[0] = torch.inf


def _differences(held: list[tuple[int, nn.Module]], reference: list[nn.Module], what: str) -> list[str]:
    return [
        f"{what}: stage {piece} differs"
        for piece, module in held
        for mine, theirs in zip(module.parameters(), reference[piece].parameters(), strict=True)
        if not transparency.difference(mine.detach(), theirs.detach()) <= transparency.TOLERANCE
    ]


def train(rank: int, size: int, group: Any, name: str, loss: str, fused: bool) -> list[str]:
    """Eight updates, three of them with an overflow somewhere, the last ones with a frozen first stage."""
    torch.manual_seed(3)
    modules: list[nn.Module] = [Block(WIDTH).double() for _ in range(transparency.count_stages(name, size))]
    reference = copy.deepcopy(modules)
    module_loss = LossWithParameters().double()
    their_loss: Callable[..., Tensor] = copy.deepcopy(module_loss) if loss == "module" else functional.mse_loss
    loss_fn = {"module": module_loss, "function": functional.mse_loss, "own backward": own_backward}[loss]
    built = transparency.build(
        rank, size, group, name, modules, 4, loss_fn=loss_fn, timeout=20, scale_grads=loss != "function"
    )
    holds_last = any(piece == len(modules) - 1 for piece, _ in built.held)
    options = {"init_scale": 1024.0, "growth_interval": 2}
    scaler = pypipe.GradScaler(built.schedule, **options)  # type: ignore[arg-type]
    whole_scaler = torch.amp.GradScaler("cpu", **options)  # type: ignore[arg-type]
    mine = [p for _, module in built.held for p in module.parameters()]
    theirs = [p for module in reference for p in module.parameters()]
    if loss == "module":
        mine += module_loss.parameters() if holds_last else []
        theirs += their_loss.parameters()  # type: ignore[attr-defined]
    adam = {"lr": 0.01, "eps": 1e-3, "fused": fused}
    optimizer: Any = torch.optim.Adam(mine, **adam)  # type: ignore[arg-type]
    their_optimizer = torch.optim.Adam(theirs, **adam)  # type: ignore[arg-type]
    found = []
    for step in range(8):
        if step == FROZEN_FROM and len(modules) > 1:
            for piece, module in [*built.held, (0, reference[0])]:
                module.requires_grad_(piece > 0)
            if [piece for piece, _ in built.held] == [0]:
                optimizer = None
        for _ in range(1 + step % 2):  # every second update adds up two steps
            x, y = torch.randn(2, 9, WIDTH, dtype=torch.float64)
            losses: list[Tensor] = []
            built.schedule.step(x, target=y, losses=losses)
            pieces = zip(torch.tensor_split(x, 4), torch.tensor_split(y, 4), strict=True)
            expected = []
            for chunk, target in pieces:
                one = their_loss(unpipelined(reference, chunk), target)
                share = len(chunk) / len(x) if loss != "function" else 1.0
                whole_scaler.scale(one * share).backward()
                expected.append(one.detach())
            if holds_last and not all(
                abs(float(a - b)) <= 1e-12 * abs(float(b)) for a, b in zip(losses, expected, strict=True)
            ):
                found.append(f"rank {rank}, step {step}: the losses are {losses}, not {expected}")
        if step in INFINITIES:
            piece = INFINITIES[step] % len(modules)
            for number, module in built.held:
                if number == piece:
                    _poison(module)
            _poison(reference[piece])
        if step % 3 == 2:  # clip what is unscaled
            scaler.unscale_(optimizer)
            whole_scaler.unscale_(their_optimizer)
            norm = built.schedule.clip_grad_norm_(0.01)
            their_norm = nn.utils.clip_grad_norm_(theirs, 0.01)
            if not abs(float(norm) / float(their_norm) - 1) <= 1e-12:
                found.append(f"rank {rank}, step {step}: the norm is {norm}, not {their_norm}")
        scaler.step(optimizer)
        scaler.update()
        whole_scaler.step(their_optimizer)
        whole_scaler.update()
        for parameter in (*mine, *theirs):
            parameter.grad = None
        if scaler.get_scale() != whole_scaler.get_scale():
            found.append(f"rank {rank}, step {step}: the scale is {scaler.get_scale()}, not {whole_scaler.get_scale()}")
        found += _differences(built.held, reference, f"rank {rank}, step {step}")
        if step == 3:  # a new scaler takes over
            state = scaler.state_dict()
            if state != whole_scaler.state_dict():
                found.append(f"rank {rank}: the state is {state}")
            del scaler
            scaler = pypipe.GradScaler(built.schedule)
            scaler.load_state_dict(state)
    built.schedule.close()
    return found


def two_schedules(rank: int, size: int, group: Any) -> list[str]:
    """One scaler for two models with an optimizer each; the second one overflows on one rank."""
    torch.manual_seed(3)
    models = [[Block(WIDTH) for _ in range(size)] for _ in range(2)]
    schedules = [
        pypipe.Schedule1F1B(pypipe.PipelineStage(model[rank], rank, size, group=group), 2, functional.mse_loss)
        for model in models
    ]
    scaler = pypipe.GradScaler(schedules, init_scale=64.0)
    optimizers = [torch.optim.SGD(model[rank].parameters(), lr=0.1) for model in models]
    before = copy.deepcopy([model[rank].state_dict() for model in models])
    x, y = torch.randn(2, 4, WIDTH)
    for schedule in schedules:
        schedule.step(x, target=y)
    if rank == 0:
        _poison(models[1][rank])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for schedule in schedules:
        schedule.close()
    moved = [
        any(not torch.equal(was[key], now) for key, now in model[rank].state_dict().items())
        for was, model in zip(before, models, strict=True)
    ]
    found = [] if moved == [True, False] else [f"rank {rank}: {moved}"]
    return found if scaler.get_scale() == 32.0 else [*found, f"rank {rank}: {scaler.get_scale()}"]


def replicas(rank: int, size: int, group: Any, cases: list[Case]) -> list[str]:
    """Shards of which one rank's alone overflows: no rank's optimizer steps, and all scales fall."""
    found = []
    for case in cases:
        trained = Replicas(rank, size, case)
        scaler = pypipe.GradScaler(trained.schedule, init_scale=1024.0, growth_interval=2)
        for step in range(4):
            before = [p.detach().clone() for _, module in trained.held for p in module.parameters()]
            trained.step(step)
            bad = step == 1
            if trained.partial:  # the averages of what nothing wraps are not this rank's
                for module in (*(module for _, module in trained.held), *trained.reference):
                    shift: Any = module.shift
                    shift.grad.zero_()
            if bad and rank == size - 1:
                shards = [p.grad for _, m in trained.held for p in m.parameters() if p.grad is not None]
                local = [g.to_local() if isinstance(g, DTensor) else g for g in shards]
                next(part for part in local if part.numel()).view(-1)[0] = torch.nan
            if not bad:
                scaler.unscale_(trained.optimizer)
                trained.check_gradients(f"step {step}")
                scaler.step(trained.optimizer)
                trained.their_optimizer.step()
            else:
                scaler.step(trained.optimizer)
                after = [p.detach() for _, module in trained.held for p in module.parameters()]
                if not all(torch.equal(_local(a), _local(b)) for a, b in zip(before, after, strict=True)):
                    found.append(f"rank {rank}, {case}: the step was not skipped")
            scaler.update()
            trained.zero_grad()
        if scaler.get_scale() != 1024.0:  # halved once, doubled once
            found.append(f"rank {rank}, {case}: the scale is {scaler.get_scale()}")
        trained.schedule.close()
        found += trained.differences
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wrong(rank: int, size: int, group: Any, case: str) -> str:
    """What a rank raises."""
    torch.manual_seed(5)
    module = Block(WIDTH)
    schedule = pypipe.Schedule1F1B(
        pypipe.PipelineStage(module, rank, size, group=group), 2, functional.mse_loss, timeout=20
    )
    x, y = torch.randn(2, 4, WIDTH)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    try:
        scaler = pypipe.GradScaler(schedule, init_scale=64.0 if case != "other scales" else 64.0 * (1 + rank))
        match case:
            case "scale by hand":
                scaler.scale(torch.ones(()))
            case "a second scaler":
                pypipe.GradScaler(schedule)
            case "no schedule":
                pypipe.GradScaler(module)  # type: ignore[arg-type]
        schedule.step(x, target=y)
        if case == "twice":
            scaler.unscale_(optimizer)
            scaler.unscale_(optimizer)
        if case == "half" and rank == 0:
            next(module.parameters()).grad = None
            module.linear.weight = nn.Parameter(module.linear.weight.detach().half())
            module.linear.weight.grad = torch.ones_like(module.linear.weight)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if case == "another call" and rank == 1:
            schedule.clip_grad_norm_(1.0)
        elif case == "closed" and rank == 1:
            schedule.close()
            return "closed"
        scaler.step(optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(pypipe.PipelineError):
            schedule.close()
    return "nothing"


def disabled(rank: int, size: int, group: Any) -> list[Any]:
    """enabled=False: what a plain optimizer does."""
    torch.manual_seed(5)
    module = Block(WIDTH)
    schedule = pypipe.Schedule1F1B(
        pypipe.PipelineStage(module, rank, size, group=group), 2, functional.mse_loss, timeout=20
    )
    scaler = pypipe.GradScaler(schedule, enabled=False)
    other = pypipe.GradScaler(schedule, enabled=False)
    x, y = torch.randn(2, 4, WIDTH)
    schedule.step(x, target=y)
    gradient = next(module.parameters()).grad
    assert gradient is not None
    before, plain = next(module.parameters()).detach().clone(), gradient.clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    schedule.close()
    moved = torch.equal(next(module.parameters()), before - 0.5 * plain)
    return [moved, scaler.get_scale(), scaler.state_dict(), other.scale(3), scaler.step(None)]
