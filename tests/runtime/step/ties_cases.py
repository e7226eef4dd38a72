"""One weight in several stages, against the unpipelined model in which it is one parameter."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transparency
from data_parallel_cases import mesh_of, no_sync, whole
from models import Block, unpipelined
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import pypipe

WORDS, WIDTH, ROWS = 9, 6, 9


class Embedding(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.table, self.block = weight, Block(WIDTH).double()

    def forward(self, x: Tensor) -> Any:
        return self.block(self.table[x])


class Head(nn.Module):
    """Multiplies by the table; now and then it leaves that out of the graph."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.projection, self.block, self.uses = weight, Block(WIDTH).double(), True

    def forward(self, x: Tensor) -> Any:
        weight = self.projection if self.uses else self.projection.detach()
        return self.block(x) @ weight.t()


class Middle(nn.Module):
    """Uses the table in between."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.block, self.again = Block(WIDTH).double(), weight

    def forward(self, x: Tensor) -> Any:
        return self.block(x) + 0.1 * self.again.sum(0)


def _model(count: int, n_uses: int) -> list[nn.Module]:
    """A model whose first and last stage, and n_uses - 2 between them, share one parameter."""
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(WORDS, WIDTH, dtype=torch.float64))
    middle = [Middle(weight) if number < n_uses - 2 else Block(WIDTH).double() for number in range(count - 2)]
    return [Embedding(weight), *middle, Head(weight)]


def _apart(model: list[nn.Module]) -> list[nn.Module]:
    """The same stages, each with a copy of the shared parameter of its own."""
    return [copy.deepcopy(module) for module in model]


def _shared(module: nn.Module) -> nn.Parameter | None:
    module = getattr(module, "module", module)  # of DistributedDataParallel
    found = [getattr(module, name) for name in ("table", "projection", "again") if hasattr(module, name)]
    return found[0] if found else None


def _tie(modules: list[nn.Module]) -> None:
    for module in modules:
        if (parameter := _shared(module)) is not None:
            pypipe.tie(parameter, "table")


def _batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (rows,)), torch.randint(WORDS, (rows,))


def train(rank: int, size: int, group: Any, name: str, n_uses: int) -> tuple[list[bytes], list[str]]:
    """Ten Adam steps; the copies' bits, and what differs from the tied model. Some steps add up two batches."""
    count = transparency.count_stages(name, size)
    reference = _model(count, min(n_uses, count))
    modules = _apart(reference)
    built = transparency.build(rank, size, group, name, modules, 4, loss_fn=functional.cross_entropy, timeout=20)
    held = [module for _, module in built.held]
    _tie(held)
    mine = list({id(p): p for module in held for p in module.parameters()}.values())
    theirs = list({id(p): p for module in reference for p in module.parameters()}.values())
    optimizer, their_optimizer = (torch.optim.Adam(each, lr=0.01, eps=1e-3) for each in (mine, theirs))
    bits, found = [], []
    for step in range(10):
        for module in (*held, *reference):
            if isinstance(module, Head):
                module.uses = step % 4 != 3
            if n_uses > 2 and (parameter := _shared(module)) is not None:
                parameter.requires_grad_(step not in (0, 5))  # frozen when the ranks meet, and once later
        for _ in range(1 + step % 2):
            x, y = _batch()
            built.schedule.step(x, target=y)
            functional.cross_entropy(unpipelined(reference, x), y).backward()
        if step % 3 == 1:
            norm = built.schedule.clip_grad_norm_(0.01)
            expected = nn.utils.clip_grad_norm_(theirs, 0.01)
            if not abs(float(norm) / float(expected) - 1) <= 1e-12:
                found.append(f"rank {rank}, step {step}: the norm is {norm}, not {expected}")
        for piece, module in built.held:
            for (which, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
                if not transparency.difference(a.grad, b.grad) <= transparency.TOLERANCE:
                    found.append(f"rank {rank}, step {step}: the gradient of {which} of stage {piece} differs")
        optimizer.step()
        their_optimizer.step()
        for optim in (optimizer, their_optimizer):
            optim.zero_grad(set_to_none=step % 2 == 0)
        for piece, module in built.held:
            for (which, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
                if not transparency.difference(a.detach(), b.detach()) <= transparency.TOLERANCE:
                    found.append(f"rank {rank}, step {step}: {which} of stage {piece} differs")
        bits += [bytes(p.detach().numpy().tobytes()) for m in held if (p := _shared(m)) is not None]
    built.schedule.close()
    return bits, found


def train_many(rank: int, size: int, group: Any, cases: list[tuple[str, int]]) -> list[str]:
    """What differs in any of these cases."""
    return [text for name, n_uses in cases for text in train(rank, size, group, name, n_uses)[1]]


def shared_objects(rank: int, size: int, group: Any, name: str) -> list[str]:
    """Two stages of a rank share the parameter itself, and it is tied as well, or not at all."""
    found = []
    for tied in (False, True):
        reference = _model(transparency.count_stages(name, size), 2)
        modules = _apart(reference)
        built = transparency.build(rank, size, group, name, modules, 4, loss_fn=functional.cross_entropy, timeout=20)
        by_piece = dict(built.held)
        if {0, len(modules) - 1} <= by_piece.keys():
            by_piece[len(modules) - 1].projection = by_piece[0].table
        if tied:
            _tie([module for _, module in built.held])
        for _ in range(2):
            x, y = _batch()
            built.schedule.step(x, target=y)
            functional.cross_entropy(unpipelined(reference, x), y).backward()
        norm = built.schedule.clip_grad_norm_(0.01)
        theirs = list({id(p): p for module in reference for p in module.parameters()}.values())
        if not abs(float(norm) / float(nn.utils.clip_grad_norm_(theirs, 0.01)) - 1) <= 1e-12:
            found.append(f"rank {rank}, tied {tied}: the norm differs")
        for piece, module in built.held:
            for (which, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
                if not transparency.difference(a.grad, b.grad) <= transparency.TOLERANCE:
                    found.append(f"rank {rank}, tied {tied}: the gradient of {which} of stage {piece} differs")
        built.schedule.close()
    return found


def replicas(rank: int, size: int, group: Any, name: str, wrapper: str) -> list[str]:
    """Two pipelines of two ranks, whose stages are replicated or sharded; also steps without a reduction."""
    mesh = mesh_of(size, 2)
    replica, place = divmod(rank, 2)
    reference = _model(transparency.count_stages(name, 2), 2)
    pieces = transparency.pieces_of(name, place, 2)
    data = mesh["dp"]

    def wrap(module: nn.Module) -> nn.Module:
        if wrapper == "fsdp":
            fully_shard(module, mesh=data)
            return module
        return DistributedDataParallel(
            module,
            process_group=data.get_group(),
            gradient_as_bucket_view=wrapper == "bucket_view",
            find_unused_parameters=wrapper == "find_unused",
        )

    own = [(piece, wrap(_apart(reference)[piece])) for piece in pieces]
    group = mesh["pp"].get_group()
    stages = [pypipe.PipelineStage(module, piece, len(reference), group=group) for piece, module in own]
    schedule = getattr(pypipe, name)(stages if len(stages) > 1 else stages[0], 4, functional.cross_entropy, timeout=20)
    held = [module for _, module in own]
    _tie(held)
    optimizer = torch.optim.SGD([p for module in held for p in module.parameters()], lr=0.1)
    their_optimizer = torch.optim.SGD({p for module in reference for p in module.parameters()}, lr=0.1)
    found = []
    for step in range(6):
        if wrapper == "find_unused":
            for module in (*(getattr(m, "module", m) for m in held), *reference):
                if isinstance(module, Head):
                    module.uses = step % 3 != 1
        for number in range(3):  # two without a reduction, then one with it
            batches = [_batch() for _ in range(2)]
            with no_sync(held) if number < 2 and step % 2 else contextlib.nullcontext():
                x, y = batches[replica]
                schedule.step(x, target=y)
            for x, y in batches:
                (functional.cross_entropy(unpipelined(reference, x), y) / 2).backward()
        for piece, module in own:
            for (which, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
                gradient = None if a.grad is None else whole(a.grad)
                if not transparency.difference(gradient, b.grad) <= transparency.TOLERANCE:
                    found.append(f"rank {rank}, step {step}: the gradient of {which} of stage {piece} differs")
        optimizer.step()
        their_optimizer.step()
        optimizer.zero_grad()
        their_optimizer.zero_grad()
    schedule.close()
    return found


def refused(rank: int, size: int, group: Any, case: str) -> str:
    """What a rank raises."""
    first = rank == 0
    weight = nn.Parameter(torch.ones(WORDS, WIDTH, dtype=torch.float64))
    modules = _apart(_model(2, 2))
    module: Any = modules[rank]
    parameter = _shared(module)
    assert parameter is not None
    name = "table" if first else "projection"
    match case:
        case "values":
            with torch.no_grad():
                parameter.add_(rank)
        case "shape":
            setattr(module, name, nn.Parameter(weight[: WORDS - rank].detach().clone()))
        case "dtype" if first:
            setattr(module, name, nn.Parameter(weight.detach().float()))
        case "frozen" if first:
            parameter.requires_grad_(False)
        case "hook" if first:
            parameter.register_post_accumulate_grad_hook(lambda _: None)
    parameter = _shared(module)
    assert parameter is not None
    if case != "one only" or first:
        pypipe.tie(parameter, "table")
    if case == "copied" and first:
        module = copy.deepcopy(module)
    stage = pypipe.PipelineStage(module, rank, size, group=group)
    schedule = pypipe.Schedule1F1B(stage, 2, functional.cross_entropy, timeout=20)
    x, y = _batch()
    try:
        if case == "replaced":
            schedule.step(x, target=y)
            if first:
                module.table = nn.Parameter(parameter.detach().clone())
        schedule.step(x, target=y)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(pypipe.PipelineError):
            schedule.close()
    return "nothing"


def failure(rank: int, size: int, group: Any) -> tuple[str, bool]:
    """A rank fails at the end of its step, when the other has begun to add up; `.grad` of earlier steps comes back."""
    module: Any = _apart(_model(2, 2))[rank]
    parameter = _shared(module)
    assert parameter is not None
    pypipe.tie(parameter, "table")
    stage = pypipe.PipelineStage(module, rank, size, group=group)
    schedule = pypipe.ScheduleGPipe(stage, 2, functional.cross_entropy, timeout=20)
    x, y = _batch()
    schedule.step(x, target=y)
    gradient = parameter.grad
    assert gradient is not None
    before = gradient.clone()

    def fail(_: Tensor) -> None:
        raise ValueError("a hook fails")

    if rank == 0:
        module.block.linear.weight.register_hook(fail)
    said = "nothing"
    try:
        schedule.step(x, target=y)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    with contextlib.suppress(pypipe.PipelineError):
        schedule.close()
    return said, rank == 0 or (parameter.grad is gradient and torch.equal(gradient, before))


def bad_arguments() -> list[str]:
    """What tie() says of what cannot be tied."""
    parameter = nn.Parameter(torch.ones(2))
    pypipe.tie(parameter, "a")
    pypipe.tie(parameter, "a")
    calls: list[Callable[[], None]] = [
        lambda: pypipe.tie(parameter, "b"),
        lambda: pypipe.tie(parameter * 2, "b"),
        lambda: pypipe.tie("weight", "b"),  # type: ignore[arg-type]
        lambda: pypipe.tie(nn.Parameter(torch.ones(2)), ""),
        lambda: pypipe.tie(nn.LazyLinear(2).weight, "b"),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except pypipe.ConfigurationError as error:
            said.append(str(error))
    assert dist.is_available()
    return said
