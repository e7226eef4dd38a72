"""A composition: what stands around or inside the stages, trained with and without a pipeline and compared."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transparency
from torch import Tensor, nn
from torch.nn import functional

import pypipe

WIDTH, ROWS, N_MICROBATCHES, STEPS, RATE = 4, 7, 3, 3, 0.1


class Stage(nn.Module):
    """An ordinary stage; most cases change something about it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x))


def stages(count: int) -> list[nn.Module]:
    return [Stage() for _ in range(count)]


def every(make: Callable[[], nn.Module]) -> Callable[[int], list[nn.Module]]:
    """A model each of whose stages is made alike."""
    return lambda count: [make() for _ in range(count)]


def descend(modules: list[nn.Module], step: int, group: Any) -> None:
    """An optimizer's step by hand: it takes sparse and complex gradients, and parameters that come and go.

    A parameter of two modules is moved once.
    """
    with torch.no_grad():
        for parameter in {id(p): p for module in modules for p in module.parameters()}.values():
            if parameter.grad is not None:
                parameter.sub_(RATE * (parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad))


def nothing(module: nn.Module, notes: dict[str, Tensor], step: int) -> None:
    pass


@dataclasses.dataclass
class Composition:
    """One row of the table."""

    make: Callable[[int], list[nn.Module]] = stages
    """The stages; called anew, from the same seed, for the run without a pipeline."""
    tie: Callable[[list[nn.Module], list[list[int]]], None] | None = None
    """Shares something among the stages of each rank, whose numbers it is given by rank."""
    whole: bool = True
    """Whether the unpipelined model runs the whole batch at once, not its microbatches one by one."""
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What step() is called in; and forward of the unpipelined model."""
    around_eval: Callable[[], contextlib.AbstractContextManager[Any]] = torch.no_grad
    update: Callable[[list[nn.Module], int, Any], None] = descend
    """What follows a step: called with this rank's modules, the step's number and the pipeline's group."""
    after: Callable[[nn.Module, dict[str, Tensor], int], None] = nothing
    """What is done with each module after an update; what it notes is compared."""
    loss: Callable[..., Tensor] = functional.mse_loss
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12
    wrap: Callable[[nn.Module, Any], nn.Module] | None = None
    """Wraps a stage; called with the pipeline's group."""
    refused: str | None = None
    """What every rank raises says this; None where the numbers are to be right."""
    schedules: tuple[str, ...] | None = None
    """The schedules that it is tried in; None for all."""


def _dense(value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    value = value.detach()
    value = value.to_dense() if value.is_sparse else value
    return torch.view_as_real(value) if value.is_complex() else value


def _draws_by_itself(module: nn.Module, stage: int) -> None:
    """Has a stage draw from a random stream of its own, as one on a rank of its own would."""
    forward = module.forward
    state = torch.Generator().manual_seed(1000 + stage).get_state()

    def wrapped(*args: Any) -> Any:
        nonlocal state
        outside = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            return forward(*args)
        finally:
            state = torch.get_rng_state()
            torch.set_rng_state(outside)

    module.forward = wrapped


def _made(case: Composition, count: int, pieces: list[list[int]]) -> list[nn.Module]:
    torch.manual_seed(0)
    modules = case.make(count)
    if case.tie is not None:
        case.tie(modules, pieces)
    for module in modules:
        module.to(case.dtype if not any(p.is_complex() for p in module.parameters()) else None)
    return modules


class _Reference:
    """The unpipelined model."""

    def __init__(self, case: Composition, modules: list[nn.Module]) -> None:
        self._case, self.modules = case, modules
        self.notes: list[dict[str, Tensor]] = [{} for _ in modules]

    def _forward(self, x: Any) -> Any:
        for module in self.modules:
            x = module(*x) if isinstance(x, tuple) else module(x)
        return x

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        case = self._case
        xs, ys = (torch.tensor_split(tensor, N_MICROBATCHES) for tensor in (x, y))
        if case.whole:
            with case.around():
                output = self._forward(x)
                loss = case.loss(output, y)
                loss.backward()
            chunks = zip(torch.tensor_split(output.detach(), N_MICROBATCHES), ys, strict=True)
            return output.detach(), [case.loss(*chunk) for chunk in chunks]
        outputs, losses = [], []
        with case.around():
            for a, b in zip(xs, ys, strict=True):
                output = self._forward(a)
                loss = case.loss(output, b)
                (loss * (len(a) / len(x))).backward()
                outputs.append(output.detach())
                losses.append(loss.detach())
        return torch.cat(outputs), losses

    def update(self, step: int) -> None:
        self._case.update(self.modules, step, None)
        for module, notes in zip(self.modules, self.notes, strict=True):
            self._case.after(module, notes, step)

    def evaluate(self, x: Tensor) -> Tensor:
        for module in self.modules:
            module.eval()
        with self._case.around_eval():
            return self._forward(x)


def _compare(rank: int, size: int, group: Any, name: str, case: Composition) -> list[str]:
    count = transparency.count_stages(name, size)
    pieces = [transparency.pieces_of(name, each, size) for each in range(size)]
    modules, reference = _made(case, count, pieces), _Reference(case, _made(case, count, pieces))
    if case.wrap is not None:
        modules = [case.wrap(module, group) for module in modules]
    for stage in range(count):
        for module in (modules[stage], reference.modules[stage]):
            if any(isinstance(part, nn.Dropout) for part in module.modules()):
                _draws_by_itself(module, stage)
    schedule, held = transparency.build(rank, size, group, name, modules, N_MICROBATCHES, loss_fn=case.loss, timeout=10)
    notes: dict[int, dict[str, Tensor]] = {piece: {} for piece, _ in held}
    found: list[str] = []

    def check(what: str, mine: Tensor | None, theirs: Tensor | None) -> None:
        worst = transparency.difference(_dense(mine), _dense(theirs))
        if not worst <= case.tolerance:
            found.append(f"{what} differs by {worst:g}")

    torch.manual_seed(1)
    batches = [torch.randn(2, ROWS, WIDTH, dtype=case.dtype) for _ in range(STEPS + 1)]
    last = any(piece == count - 1 for piece, _ in held)
    with schedule:
        for step, (x, y) in enumerate(batches[:STEPS]):
            losses: list[Tensor] = []
            with case.around():
                output = schedule.step(x, target=y, losses=losses)
            expected, expected_losses = reference.step(x, y)
            if last:
                check(f"output of step {step}", output, expected)
                check(f"losses of step {step}", torch.stack(losses), torch.stack(expected_losses))
            for piece, module in held:
                named = zip(module.named_parameters(), reference.modules[piece].parameters(), strict=True)
                for (parameter, a), b in named:
                    check(f"gradient of {parameter} of stage {piece} in step {step}", a.grad, b.grad)
            case.update([module for _, module in held], step, group)
            reference.update(step)
            for piece, module in held:
                case.after(module, notes[piece], step)
            for module in [*(module for _, module in held), *reference.modules]:
                module.zero_grad()
        for piece, module in held:
            mine, theirs = module.state_dict(), reference.modules[piece].state_dict()
            for entry, value, expected in zip(mine, mine.values(), theirs.values(), strict=True):
                check(f"{entry} of stage {piece} after {STEPS} steps", value, expected)
            if notes[piece].keys() != reference.notes[piece].keys():
                found.append(f"notes of stage {piece}: {list(notes[piece])}, not {list(reference.notes[piece])}")
            for what, note in notes[piece].items():
                check(f"{what} of stage {piece}", note, reference.notes[piece].get(what))
            module.eval()
        with case.around_eval():
            evaluated = schedule.eval(batches[-1][0])
        if last:
            check("output of eval", evaluated, reference.evaluate(batches[-1][0]))
    return found


def run(rank: int, size: int, group: Any, name: str, cases: dict[str, Composition]) -> dict[str, list[str]]:
    """What is wrong with each case in a schedule; all ranks go through them in the same order."""
    warnings.simplefilter("ignore")
    found: dict[str, list[str]] = {}
    for title, case in cases.items():
        if case.schedules is not None and name not in case.schedules:
            continue
        try:
            found[title] = _compare(rank, size, group, name, case)
            if case.refused is not None:
                found[title].append("nothing was raised")
        except Exception as error:
            text = str(error)
            if case.refused is None or not isinstance(error, (pypipe.PipelineError, ValueError)):
                found[title] = [traceback.format_exc(limit=-4)]
            else:
                found[title] = [] if case.refused in text else [f"raised {type(error).__name__}: {text}"]
        found[title] = [f"rank {rank}, {name}, {title}: {text}" for text in found[title]]
    return found
