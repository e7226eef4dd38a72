"""Two copies of one model on the same ranks: gradients, losses and outputs of both, in the cases where that is hard."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from models import Block, unpipelined
from torch import Tensor, nn
from torch.nn import functional
from transparency import TOLERANCE, difference

import pypipe

WIDTH = 6


class Tied(nn.Module):
    """Embeds first and unembeds last, by one weight that the two stages of the end ranks share."""

    def __init__(self, weight: nn.Parameter, last: bool) -> None:
        super().__init__()
        self.weight, self.last = weight, last
        self.block = Block(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) @ self.weight.t() if self.last else self.block(self.weight[x])


class Odd(nn.Module):
    """Has a parameter that nothing depends on, a frozen one, a transposed gradient and one of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.unused = Block(WIDTH), nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.w, self.empty = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) @ self.w.t() * self.frozen + self.empty.sum()


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


class LossWithParameters(nn.Module):
    """A head in the loss, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.head(output) * self.scale * self.frozen, target)


def _build(name: str, size: int) -> list[nn.Module]:
    torch.manual_seed(3)
    modules: list[nn.Module] = [Block(WIDTH) for _ in range(size)]
    if name == "tied":
        weight = nn.Parameter(torch.randn(9, WIDTH))
        modules[0], modules[-1] = Tied(weight, False), Tied(weight, True)
    elif name == "odd":
        modules = [Odd() for _ in range(size)]
    elif name == "sparse":
        modules[0] = Lookup()
    for module in modules:
        module.double()
    if name == "tied":
        modules[-1].weight = modules[0].weight
    return modules


def _batch(name: str, rows: int) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
    y = torch.randn(rows, WIDTH, dtype=torch.float64)
    if name == "tied":
        return torch.randint(9, (rows,)), torch.randint(9, (rows,)), functional.cross_entropy
    if name == "sparse":
        return torch.randint(9, (rows,)), y, functional.mse_loss
    if name == "loss":
        with torch.random.fork_rng([]):
            torch.manual_seed(8)
            return torch.randn(rows, WIDTH, dtype=torch.float64), y, LossWithParameters().double()
    return torch.randn(rows, WIDTH, dtype=torch.float64), y, functional.mse_loss


def train(rank: int, size: int, group: Any, name: str, n_microbatches: int) -> list[str]:
    """Steps with and without zero_grad(); what differs from the unpipelined model."""
    modules = _build(name, size)
    reference = copy.deepcopy(modules)
    pieces = [rank, size - 1 - rank]
    held = copy.deepcopy([modules[piece] for piece in pieces])  # one call: what they share stays shared
    stages = [
        pypipe.PipelineStage(module, piece, size, group=group) for piece, module in zip(pieces, held, strict=True)
    ]
    *_, loss_fn = _batch(name, 1)
    losses_of = [(size - 1, loss_fn)] if isinstance(loss_fn, nn.Module) and rank in (0, size - 1) else []
    their_loss = copy.deepcopy(loss_fn)
    found: list[str] = []
    kept: list[Tensor | None] = []
    schedule = pypipe.ScheduleDualPipe(stages, n_microbatches, loss_fn, timeout=20)
    for step in range(4):
        x, y, _ = _batch(name, 2 * n_microbatches + 1)
        losses: list[Tensor] = []
        output = schedule.step(x, target=y, losses=losses, return_outputs=step != 1)
        expected = unpipelined(reference, x)
        their_loss(expected, y).backward()
        if rank in (0, size - 1):
            if step != 1 and difference(output, expected.detach()) > TOLERANCE:
                found.append(f"rank {rank}: the output differs")
            if len(losses) != n_microbatches:
                found.append(f"rank {rank}: {len(losses)} losses")
        elif output is not None or losses:
            found.append(f"rank {rank} got an output")
        for (which, a), b in zip(
            [pair for _, loss in losses_of for pair in loss.named_parameters()],
            their_loss.parameters() if losses_of else (),  # type: ignore[attr-defined]
            strict=True,
        ):
            if not difference(a.grad, b.grad) <= TOLERANCE:
                found.append(f"rank {rank}, step {step}: the gradient of the loss's {which} differs")
        gradients = [p.grad for module in held for p in module.parameters()]
        if step == 1 and any(a is not b for a, b in zip(gradients, kept, strict=True)):
            found.append(f"rank {rank}: gradients moved to other tensors")
        kept = gradients
        for piece, module in zip(pieces, held, strict=True):
            for (which, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
                if a.grad is not None and b.grad is not None and a.grad.is_sparse != b.grad.is_sparse:
                    found.append(f"rank {rank}, step {step}: {which} of stage {piece} changed its layout")
                dense = [g.to_dense() if g is not None and g.is_sparse else g for g in (a.grad, b.grad)]
                if not difference(*dense) <= TOLERANCE:
                    found.append(f"rank {rank}, step {step}: the gradient of {which} of stage {piece} differs")
        if step >= 1:
            for module in (*held, *reference, *(loss for _, loss in losses_of)):
                module.zero_grad()
            if losses_of:
                their_loss.zero_grad()  # type: ignore[attr-defined]
            kept = []
    schedule.close()
    return found


def _scaled(output: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    return functional.mse_loss(output * scale, target)


def refused(rank: int, size: int, group: Any, case: str) -> str:
    """What a rank raises when something is wrong with the two copies."""
    torch.manual_seed(3)
    modules: list[nn.Module] = [Block(WIDTH) for _ in range(size)]
    pieces = [rank, size - 1 - rank]
    held = [copy.deepcopy(modules[piece]) for piece in pieces]
    rows = 8
    if case == "other values" and rank == 1:
        nn.init.normal_(held[1].linear.weight)  # type: ignore[arg-type, union-attr]
    elif case == "one copy frozen" and rank == 1:
        held[1].requires_grad_(False)
    elif case == "lazy" and rank == 1:
        held[1] = nn.LazyLinear(WIDTH)
    elif case == "other batch" and rank == 0:
        rows = 6
    elif case == "optimizer in the backward" and rank == 1:
        next(held[0].parameters()).register_post_accumulate_grad_hook(lambda p: None)
    stages = [
        pypipe.PipelineStage(module, piece, size, group=group) for piece, module in zip(pieces, held, strict=True)
    ]
    x, y, free = torch.ones(rows, WIDTH), torch.ones(rows, WIDTH), nn.Parameter(torch.ones(WIDTH))
    loss_fn: Callable[..., Tensor] = functional.mse_loss
    options: dict[str, Any] = {}
    args: tuple[Tensor, ...] = (x * free,) if case == "x" else (x,)
    if case == "target":
        y = y * free
    elif case == "loss_kwargs":
        loss_fn, options = _scaled, {"loss_kwargs": {"scale": free}}
    elif case == "closure":
        loss_fn = lambda output, target: _scaled(output, target, free)  # noqa: E731
    elif case == "input on the first rank only" and rank == 1:
        args = ()
    elif case == "target on the last rank only" and rank == 0:
        y = None  # type: ignore[assignment]
    elif case == "other loss":
        torch.manual_seed(rank)
        loss_fn = LossWithParameters()
    try:
        with pypipe.ScheduleDualPipe(stages, 4, loss_fn, timeout=20) as schedule:
            schedule.step(*args, target=y, **options)
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
