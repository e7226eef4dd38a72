"""The cases of the fault campaign: some schedule, some link, some fault on some rank at some action, from a seed."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pypipe.program import Program, build, builder_names

WIDTH = 4
LINKS = ("shm", "c10d", "nccl")  # nccl: on the emulated driver and NCCL
RAISING = ("raise", "module", "hook", "loss")
FAULTS = {  # what happens to a rank, and how often it is drawn
    "raise": 3,  # an exception at any action
    "module": 2,  # an exception in a stage's module
    "hook": 2,  # an exception in a hook that backward calls
    "loss": 1,  # an exception in the loss function
    "vanish": 5,  # its sockets close, as at its death
    "kill": 1,  # SIGKILL
    "stop": 1,  # SIGSTOP
    "late": 1,  # it takes longer than the others wait
    "leave": 2,  # it closes its schedule, and the others go on
    "corrupt": 3,  # a bit of a message changes
    "nan": 3,  # a parameter becomes NaN
}


@dataclass(frozen=True)
class Case:
    """What is to happen."""

    seed: int
    schedule: str
    n_ranks: int
    n_microbatches: int
    link: str
    fault: str
    culprit: int
    place: float  # in the culprit's list of actions, 0..1

    @property
    def program(self) -> Program:
        return build(self.schedule, self.n_ranks, self.n_microbatches)


def draw(seed: int, link: str, without: tuple[str, ...] = ()) -> Case:
    """The case of a seed."""
    source = random.Random(f"{link} {seed}")
    names = sorted(builder_names())
    left_out = (*without, "corrupt") if link == "nccl" else without  # NCCL's messages take no checksums
    faults = {fault: weight for fault, weight in FAULTS.items() if fault not in left_out}
    while True:
        name, ranks, microbatches = source.choice(names), source.randint(2, 4), source.choice([1, 2, 3, 4, 8])
        fault = source.choices(list(faults), list(faults.values()))[0]
        case = Case(seed, name, ranks, microbatches, link, fault, source.randrange(ranks), source.random())
        try:
            program = case.program
        except ValueError:  # this schedule wants other numbers
            continue
        if any(not actions for actions in program.ranks):
            continue  # a rank without anything to do notices nothing
        losses = [a for a in program.ranks[case.culprit] if a.kind.label == "F" and program.next_stage(a.stage) is None]
        if fault == "loss" and not losses:
            continue
        return case


def n_pieces(program: Program) -> int:
    return 1 + max(program.piece_of(stage) for stage in range(program.n_stages))


class Piece(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        source = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=source, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def batch(n_microbatches: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(99)
    x, y = torch.randn(2, 2 * n_microbatches, WIDTH, generator=source, dtype=torch.float64)
    return x, y


@functools.cache
def expected(pieces: int, n_microbatches: int) -> dict[int, list[list[float]]]:
    """The unpipelined model's gradients, by piece."""
    model = nn.Sequential(*(Piece(number) for number in range(pieces)))
    x, y = batch(n_microbatches)
    nn.functional.mse_loss(model(x), y).backward()
    return {number: flat([p.grad for p in piece.parameters()]) for number, piece in enumerate(model)}


def flat(gradients: list[Tensor | None]) -> list[list[float]]:
    return [[] if gradient is None else gradient.flatten().tolist() for gradient in gradients]
