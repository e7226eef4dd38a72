"""Trains a model with and without a pipeline on the same rank processes, and compares everything."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from models import make, twins, unpipelined
from random_programs import random_program
from torch import Tensor, nn

import pypipe
from pypipe import program as programs
from pypipe.program import Program, builder_names, load_csv

TOLERANCE = 1e-12
CPU = torch.device("cpu")

# Where each schedule has the model's pieces: one on each rank, looped, in a V, or two copies in opposite directions.
SINGLE = ["ScheduleGPipe", "Schedule1F1B", "ScheduleZBH1", "ScheduleZBH2"]
LOOPED = ["ScheduleAuto", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS"]
V_SHAPED = ["ScheduleZBVZeroBubble", "ScheduleVHalf", "ScheduleVMin", "ScheduleDualPipeV"]
BIDIRECTIONAL = ["ScheduleDualPipe"]


class Pipelined(NamedTuple):
    """A schedule, and what this rank's stages train: the model's pieces with their numbers."""

    schedule: Any
    held: list[tuple[int, nn.Module]]


def count_stages(name: str, size: int) -> int:
    """Into how many pieces a schedule cuts the model; names such as `ScheduleX v=2` and `random s=5` say it."""
    if (program := _given(name, size, 2 * size)) is not None:
        return len(program.chains[0].stages)
    name, _, options = name.partition(" ")
    if name == "random":
        return int(options.split()[0].removeprefix("s="))
    if options:
        return size * int(options.removeprefix("v="))
    return 2 * size if name in V_SHAPED else size


def pieces_of(name: str, rank: int, size: int) -> list[int]:
    """Which pieces a rank holds."""
    kind, count = name.partition(" ")[0], count_stages(name, size)
    if kind in V_SHAPED or name == "ScheduleAuto v=2":
        return [rank, count - 1 - rank]
    if kind in BIDIRECTIONAL:
        return [rank, size - 1 - rank]
    return list(range(rank, count, size))


def _given(name: str, size: int, n_microbatches: int) -> Program | None:
    """The program of a builder's name (the registry's) or of a CSV file's."""
    if name.endswith(".csv"):
        return load_csv(name)
    if name not in builder_names():
        return None
    options = {"effort": 0.05} if name == "auto" else {}
    return programs.build(name, size, n_microbatches, **options)


def build(
    rank: int,
    size: int,
    group: Any,
    name: str,
    modules: list[nn.Module],
    n_microbatches: int,
    device: torch.device = CPU,
    **options: Any,
) -> Pipelined:
    """A schedule of this name over the modules, which are the model's pieces; a second copy is made here.

    `random s=5 seed=0` is some program of 5 stages; a builder's name or a CSV file's is given to pypipe.Schedule.
    """
    kind, _, rest = name.partition(" ")
    program: Program | None = None
    pieces = pieces_of(name, rank, size)
    if kind == "random":
        program = random_program(size, len(modules), n_microbatches, int(rest.split()[1].removeprefix("seed=")))
        pieces = [stage for stage, holder in enumerate(program.placement) if holder == rank]
    elif (known := _given(name, size, n_microbatches)) is not None:
        pieces = [known.piece_of(stage) for stage, holder in enumerate(known.placement) if holder == rank]
    held: list[tuple[int, nn.Module]] = []
    for piece in pieces:
        is_second = kind in (*BIDIRECTIONAL, "dualpipe") and len(held) == 1
        held.append((piece, copy.deepcopy(modules[piece]) if is_second else modules[piece]))
    stages = [pypipe.PipelineStage(module, piece, len(modules), device, group=group) for piece, module in held]
    if program is not None:
        return Pipelined(pypipe.Schedule(program, stages, n_microbatches, **options), held)
    if not kind.startswith("Schedule"):
        options |= {"effort": 0.05} if kind == "auto" else {}
        return Pipelined(pypipe.Schedule(kind, stages, n_microbatches, **options), held)
    given = stages[0] if kind in SINGLE else stages
    if kind == "ScheduleAuto":
        options |= {"forward": 1.0, "input_backward": 1.25, "weight_backward": 0.75, "hop": 0.1, "effort": 0.05}
    return Pipelined(getattr(pypipe, kind)(given, n_microbatches=n_microbatches, **options), held)


Case = tuple[str, str, int, int, bool]
"""Schedule, model, M, rows of a batch, scale_grads."""


def cases(schedule: str, model: str, size: int) -> list[Case]:
    """What a schedule has to get right with so many ranks."""
    found = []
    for n_microbatches in sorted({1, 2, 3, size, 2 * size, 2 * size + 1}):
        # A batch that M divides, and one that it does not; the smallest possible one too.
        for rows in sorted({2 * n_microbatches, 2 * n_microbatches + 1, n_microbatches}):
            found.append((schedule, model, n_microbatches, rows, True))
    return found


def difference(a: Tensor | None, b: Tensor | None) -> float:
    """The largest difference, relative to the largest value; 0 for two absent gradients."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    return (
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) if b.is_floating_point() else float((a != b).any())
    )


def optimizer(modules: list[nn.Module]) -> Any:
    """AdamW: its weight decay moves a parameter whose gradient is zero, and leaves one without a gradient alone.

    A key's bias has no influence on attention, so its gradient is rounding noise, which the usual eps of 1e-8 would
    blow up to steps of visible size, different ones for any other order of summation.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-4) if parameters else None


def compare(
    rank: int,
    size: int,
    group: Any,
    name: str,
    model: str,
    n_microbatches: int,
    rows: int,
    scale_grads: bool,
    timeout: float = 30,
    device: torch.device = CPU,
) -> list[str]:
    """Three optimizer steps and evals in between; returns what differs, in words."""
    modules, make_batch, loss_fn = make(model, count_stages(name, size))
    for module in modules:
        module.to(device)
    reference = twins(modules)
    batches = [[tensor.to(device) for tensor in make_batch(rows)] for _ in range(4)]
    schedule, held = build(
        rank,
        size,
        group,
        name,
        modules,
        n_microbatches,
        device,
        loss_fn=loss_fn,
        scale_grads=scale_grads,
        timeout=timeout,
    )
    has_last = any(piece == len(modules) - 1 for piece, _ in held)
    differences: list[str] = []
    calls: list[int] = []
    for piece, module in held:
        module.register_forward_pre_hook(lambda *_, piece=piece: calls.append(piece))
    # Of two copies, each runs its direction's microbatches.
    expected_calls = n_microbatches * (1 if name.partition(" ")[0] in BIDIRECTIONAL else len(held))

    def check_calls(what: str) -> None:
        # No trial run to find shapes, be it the first step, another layout or a change between step() and eval().
        if len(calls) != expected_calls:
            differences.append(f"rank {rank}: {what} ran {len(calls)} forwards, not {expected_calls}: {calls}")
        calls.clear()

    def check(what: str, a: Tensor | None, b: Tensor | None) -> None:
        worst = difference(a, b)
        if not worst <= TOLERANCE:
            differences.append(f"rank {rank}: {what} differs by {worst:g}")

    mine, theirs = optimizer([module for _, module in held]), optimizer(reference)
    for number, (x, y) in enumerate(batches[:3]):
        losses: list[Tensor] = []
        output = schedule.step(x, target=y, losses=losses)
        check_calls(f"step {number}")
        expected = unpipelined(reference, x)
        chunks = list(
            zip(torch.tensor_split(expected, n_microbatches), torch.tensor_split(y, n_microbatches), strict=True)
        )
        if scale_grads:
            loss_fn(expected, y).backward()
        else:
            torch.stack([loss_fn(*chunk) for chunk in chunks]).sum().backward()
        if has_last:
            check(f"output of step {number}", output, expected.detach())
            check(f"losses of step {number}", torch.stack(losses), torch.stack([loss_fn(*c) for c in chunks]).detach())
        elif output is not None or losses:
            differences.append(f"rank {rank} got an output or losses")
        for piece, module in held:
            for (parameter, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
                check(f"gradient of {parameter} of stage {piece} in step {number}", a.grad, b.grad)
        if mine is not None:
            mine.step()
            mine.zero_grad()
        if theirs is not None:
            theirs.step()
            theirs.zero_grad()
        evaluated = schedule.eval(batches[3][0])
        check_calls(f"eval {number}")
        if has_last:
            with torch.no_grad():
                check(f"output of eval {number}", evaluated, unpipelined(reference, batches[3][0]))
        if any(parameter.grad is not None for _, module in held for parameter in module.parameters()):
            differences.append("eval() touched a gradient")
    for piece, module in held:
        for (entry, a), b in zip(module.state_dict().items(), reference[piece].state_dict().values(), strict=True):
            check(f"{entry} of stage {piece} after three steps", a, b)
    schedule.close()
    return differences


def compare_many(rank: int, size: int, group: Any, cases: list[Case]) -> list[str]:
    """Several cases in one call."""
    return [f"{case}: {text}" for case in cases for text in compare(rank, size, group, *case)]
