"""Who learns of a failure when: ranks that have work left, that are done but for a last look, or that have returned."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transparency
from split_cases import Scaled
from torch import Tensor, nn

import pypipe

WIDTH = 4
_SECONDS = 20.0  # for what comes at once


def _await(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < give_up, f"{what} in {_SECONDS:g} s"
        time.sleep(0.001)


def _await_cause(schedule: Any) -> None:
    hub = schedule._pipeline._running.connection.hub
    _await(lambda: hub.cause() is not None, "no word of the failure")


def _modules(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(count)]


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, WIDTH, dtype=torch.float64, generator=source) for _ in range(2))
    return x, y


def _text(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


def _call(schedule: Any, name: str, x: Tensor, y: Tensor | None) -> str:
    """What step() or eval() raises, as text."""
    try:
        schedule.step(x, target=y) if name == "step" else schedule.eval(x)
    except (ArithmeticError, pypipe.PipelineError) as error:
        return _text(error)
    return ""


def stops(rank: int, size: int, group: Any, link: str, name: str, call: str) -> tuple[str, int]:
    """Stage 1 fails in its first forward, while rank 0 is within its second one.

    Returns:
        What this rank raised, and how many forwards it began after it could know of the failure.
    """
    begun: Counter[int] = Counter()
    known: list[int] = []

    def before(piece: int) -> None:
        begun[piece] += 1
        if piece == 1:
            raise ArithmeticError("deliberate")
        if rank == 0 and begun[piece] == 2:
            _await_cause(schedule)
            known.append(begun.total())

    with patch.dict(os.environ, PYPIPE_LINK=link):
        modules = _modules(transparency.count_stages(name, size))
        schedule, held = transparency.build(
            rank, size, group, name, modules, 16, loss_fn=nn.functional.mse_loss, timeout=_SECONDS
        )
        for piece, module in held:
            module.register_forward_pre_hook(lambda *_, piece=piece: before(piece))
        text = _call(schedule, call, *_batch(32))
        schedule.close()
    return text, begun.total() - known[0] if known else 0


def at_the_end(rank: int, size: int, group: Any, link: str, name: str, call: str) -> str:
    """A failure comes while a rank is in its last action: the last rank's last F of an eval(), or rank 0's last B."""
    training = call == "step"
    culprit, late = (0, size - 1) if training else (size - 1, 0)
    with patch.dict(os.environ, PYPIPE_LINK=link):
        modules = _modules(size)
        options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "timeout": _SECONDS}
        schedule, _ = transparency.build(rank, size, group, name, modules, 4, **options)
        x, y = _batch(8)
        assert _call(schedule, call, x, y) == ""
        dist.barrier(group=group)
        executor = schedule._pipeline._running.executors[schedule._settings.n_microbatches, training]
        code, action, microbatch = executor._calls[-1]

        def last(number: int) -> None:
            action(number)  # on the culprit, it waits for what the late rank's has sent
            if rank == culprit:
                raise ArithmeticError("deliberate")
            _await_cause(schedule)

        if rank in (culprit, late):
            executor._calls[-1] = (code, last, microbatch)
        text = _call(schedule, call, x, y)
        try:
            schedule.close()
        except pypipe.PipelineError as error:
            text = text or f"close: {_text(error)}"
    return text


def ahead(rank: int, size: int, group: Any, link: str, name: str, fault: str, flag: str) -> list[str]:
    """The last rank fails when it has ended a step, and rank 0 is in its last action of that step.

    Args:
        fault: "call": the last rank's next call cannot begin; "script": an exception ends its `with` block.

    Returns:
        What each step raised on this rank.
    """
    texts = []
    with patch.dict(os.environ, PYPIPE_LINK=link):
        schedule, _ = transparency.build(
            rank, size, group, name, _modules(size), 4, loss_fn=nn.functional.mse_loss, timeout=_SECONDS
        )
        x, y = _batch(8)
        schedule.eval(x)
        dist.barrier(group=group)
        executor = schedule._pipeline._running.executors[schedule._settings.n_microbatches, True]
        code, action, microbatch = executor._calls[-1]

        def last(number: int) -> None:
            action(number)
            Path(flag).touch()
            _await_cause(schedule)

        if rank == 0:
            executor._calls[-1] = (code, last, microbatch)
        with contextlib.suppress(KeyError), schedule:
            texts.append(_call(schedule, "step", x, y))
            if rank == size - 1:
                _await(lambda: os.path.exists(flag), "rank 0 did not come to its last action")
            if rank == size - 1 and fault == "script":
                raise KeyError("deliberate")
            texts.append(_call(schedule, "step", x, None if rank == size - 1 else y))
    return texts


def returned(rank: int, size: int, group: Any, link: str, name: str, call: str, then: str, folder: str) -> list[str]:
    """A rank fails when all others have returned: the last one in its last F, or rank 0 in its last backward.

    Args:
        call: "step" with a loss, "eval", or "forward only": a step() without a loss.
        then: what the others do next, when word of it has come: "step", "eval", "close" or "with".

    Returns:
        What the failed call and the next one raised on this rank, and a step after that.
    """
    training = call == "step"
    culprit = 0 if training else size - 1
    others = [Path(folder, str(other)) for other in range(size) if other != culprit]
    count = 0

    def fail(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            _await(lambda: all(path.exists() for path in others), "the other ranks did not return")
            raise ArithmeticError("deliberate")

    module = _modules(1)[0]
    if rank == culprit and training:
        module.register_forward_hook(lambda _module, _args, output: output.register_hook(fail) and None)
    elif rank == culprit:
        module.register_forward_pre_hook(fail)
    texts = []
    with patch.dict(os.environ, PYPIPE_LINK=link):
        stage = pypipe.PipelineStage(module, rank, size, torch.device("cpu"), group=group)
        loss = None if call == "forward only" else nn.functional.mse_loss
        schedule = getattr(pypipe, name)(stage, 2, loss, timeout=_SECONDS)
        x, y = _batch(4)
        try:
            with schedule:
                texts.append(_call(schedule, "eval" if call == "eval" else "step", x, None if loss is None else y))
                if rank != culprit:
                    Path(folder, str(rank)).touch()
                    _await_cause(schedule)
                if then in ("step", "eval"):
                    texts.append(_call(schedule, then, x, y))
                elif then == "close":
                    schedule.close()
            texts += [""] * (2 - len(texts))
        except pypipe.PipelineError as error:
            texts.append(_text(error))
        schedule.close()  # says it once
        texts.append(_call(schedule, "eval", x, y))
    return texts


class Early(nn.Module):
    """A layer that can be split, and a weight whose gradient a custom Function computes with its input's."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(WIDTH, WIDTH).double()
        self.early = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Scaled.apply(self.late(x), self.early))


class Whole(nn.Module):
    """A weight whose gradient cannot be left to W."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Scaled.apply(x, self.early))


class Breaks(nn.Module):
    """Breaks its backward off in the middle, when it has come through the second layer."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH).double(), KINDS[second]()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(_deliberate)
        out: Tensor = self.second(hidden)
        return out


def broken_off(rank: int, size: int, group: Any, link: str, name: str, second: str) -> tuple[str, bool]:
    """The last rank's first backward is broken off: what each rank raises, and whether it has any `.grad`."""
    module = Breaks(second) if rank == size - 1 else _modules(1)[0]
    with patch.dict(os.environ, PYPIPE_LINK=link):
        stage = pypipe.PipelineStage(module, rank, size, torch.device("cpu"), group=group)
        schedule = getattr(pypipe, name)(stage, 4, nn.functional.mse_loss, timeout=_SECONDS)
        text = _call(schedule, "step", *_batch(8))
        schedule.close()
    return text, any(parameter.grad is not None for parameter in module.parameters())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "splits": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double(),
    "early": Early,
    "whole": Whole,
}
_NOTE = r"on rank {} \.grad holds part of this step: (\d+) of (\d+) backwards(?:, and of (\d+) more the gradients)?"


def gradients(rank: int, size: int, group: Any, link: str, name: str, kind: str, places: Sequence[float]) -> list[str]:
    """Steps that fail at some place of some rank's list: what the error says of `.grad`, against what is there."""
    found: list[str] = []
    with patch.dict(os.environ, PYPIPE_LINK=link):
        for number, place in enumerate(places):
            for text in _gradients(rank, size, group, name, kind, number % size, place):
                found.append(f"{name}, {kind}, rank {number % size} fails at {place:g}, rank {rank}: {text}")
    return found


def _gradients(rank: int, size: int, group: Any, name: str, kind: str, culprit: int, place: float) -> list[str]:
    m = 5
    torch.manual_seed(3)
    modules: list[nn.Module] = [KINDS[kind]() for _ in range(transparency.count_stages(name, size))]
    x, y = _batch(2 * m)
    each = [_gradients_of(modules, *pair) for pair in zip(x.chunk(m), y.chunk(m), strict=True)]
    schedule, held = transparency.build(
        rank, size, group, name, modules, m, loss_fn=nn.functional.mse_loss, timeout=_SECONDS
    )
    schedule.eval(x)
    dist.barrier(group=group)  # or a rank that is ahead fails while others are still in the eval()
    executor = schedule._pipeline._running.executors[schedule._settings.n_microbatches, True]
    if rank == culprit:
        at = int(place * len(executor._calls))
        code, _, microbatch = executor._calls[at]
        executor._calls[at] = (code, _deliberate, microbatch)
    steps, text = 0, ""
    while not text and steps < 3:  # a rank whose part of the step was over hears of it in the next one
        text = _call(schedule, "step", x, y)
        steps += not text
    schedule.close()
    note = re.search(_NOTE.format(rank), text)
    said = (int(note[1]), int(note[3] or 0), int(note[2])) if note else (0, 0, 0)
    whole = early = 0
    for stage, (piece, module) in _by_stage(executor.program, rank, held).items():
        orders = [
            [a.microbatch for a in dict.fromkeys(executor.actions) if a.stage == stage and a.kind.label in kinds]
            for kinds in ("BI", "BW")
        ]
        counts = {}
        for parameter, tensor in module.named_parameters():
            order = orders[0] if "early" in parameter else orders[1]
            count = _prefix(tensor.grad, [each[k][piece][parameter] for k in order], steps)
            if count is None:
                return [f"the gradient of {parameter} of stage {stage} is of no beginning of {order}"]
            counts["early" if "early" in parameter else "late"] = count
        whole += counts.get("late", counts.get("early", 0))
        early += counts["early"] - counts["late"] if len(counts) == 2 else 0
    total = m * len(held)
    problems = []
    if "deliberate" not in text:
        problems.append(f"it raised {text!r}")
    if bool(note) != bool(whole or early) or (note and said != (whole, early, total)):
        problems.append(f"{whole} of {total} backwards and parts of {early} are in .grad: {text}")
    return problems


def _deliberate(_: Any) -> None:
    raise ArithmeticError("deliberate")


def _by_stage(program: Any, rank: int, held: list[tuple[int, nn.Module]]) -> dict[int, tuple[int, nn.Module]]:
    pieces = dict(held)
    stages = [stage for stage, holder in enumerate(program.placement) if holder == rank]
    return {stage: (program.piece_of(stage), pieces[program.piece_of(stage)]) for stage in stages}


def _gradients_of(modules: list[nn.Module], x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """By stage and parameter, of a microbatch's part in the batch's loss, without a pipeline."""
    output = x
    for module in modules:
        output = module(output)
    (nn.functional.mse_loss(output, y) / 5).backward()
    found = []
    for module in modules:
        found.append({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
        module.zero_grad()
    return found


def _prefix(gradient: Tensor | None, each: list[Tensor], steps: int) -> int | None:
    """The first how many of these gradients, beside those of so many whole steps, make this one."""
    total = torch.stack(each).sum(0) * steps
    for count in range(len(each) + 1):
        if (gradient is None and not steps and not count) or (
            gradient is not None and float((gradient - total).abs().max()) < 1e-12
        ):
            return count
        if count < len(each):
            total = total + each[count]
    return None
