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
    found: list[str] = []
    kept: list[Tensor | None] = []
    schedule = pypipe.ScheduleDualPipe(stages, n_microbatches, loss_fn, timeout=20)
    for step in range(4):
        x, y, _ = _batch(name, 2 * n_microbatches + 1)
        losses: list[Tensor] = []
        output = schedule.step(x, target=y, losses=losses, return_outputs=step != 1)
        expected = unpipelined(reference, x)
        loss_fn(expected, y).backward()
        if rank in (0, size - 1):
            if step != 1 and difference(output, expected.detach()) > TOLERANCE:
                found.append(f"rank {rank}: the output differs")
            if len(losses) != n_microbatches:
                found.append(f"rank {rank}: {len(losses)} losses")
        elif output is not None or losses:
            found.append(f"rank {rank} got an output")
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
            for module in (*held, *reference):
                module.zero_grad()
            kept = []
    schedule.close()
    return found


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
    elif case == "other batch" and rank == 0:
        rows = 6
    elif case == "optimizer in the backward" and rank == 1:
        next(held[0].parameters()).register_post_accumulate_grad_hook(lambda p: None)
    stages = [
        pypipe.PipelineStage(module, piece, size, group=group) for piece, module in zip(pieces, held, strict=True)
    ]
    try:
        with pypipe.ScheduleDualPipe(stages, 4, functional.mse_loss, timeout=20) as schedule:
            schedule.step(torch.ones(rows, WIDTH), target=torch.ones(rows, WIDTH))
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
