"""The fault campaign: some schedule, some link, some fault on some rank at some action, all drawn from a seed.

Every case trains a step (whose gradients are compared with the unpipelined model's), meets its fault in the next one,
and trains on with a new schedule over the same processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pypipe
from pypipe import _core
from pypipe.program import Program, build, builder_names
from pypipe.runtime import agreement

WIDTH = 4
FAULTS = ("raise", "raise", "raise", "vanish", "vanish", "leave", "corrupt", "nan", "late")
PATIENCE = 20.0
SHORT = 0.5  # the timeout of those who wait for a rank that is late
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
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


@dataclass
class Seen:
    """What one rank saw of a case."""

    kind: str = ""
    text: str = ""
    notes: str = ""
    rank: int | None = None
    action: str | None = None  # of the error
    at: str = ""  # the culprit's action
    again: str = ""  # what a second step() on the failed schedule raised
    before: list[tuple[int, list[list[float]]]] = field(default_factory=list)  # gradients of the step before, by piece
    after: list[tuple[int, list[list[float]]]] = field(default_factory=list)  # of the first step of a new schedule


def draw(seed: int, link: str, faults: tuple[str, ...] = FAULTS) -> Case:
    """The case of a seed; the link is "shm", "c10d" or "nccl"."""
    source = random.Random(f"{link} {seed}")
    names = sorted(builder_names())
    while True:
        name, ranks, microbatches = source.choice(names), source.randint(2, 4), source.choice([1, 2, 3, 4, 8])
        case = Case(
            seed, name, ranks, microbatches, link, source.choice(faults), source.randrange(ranks), source.random()
        )
        try:
            program = case.program
        except ValueError:  # this schedule wants other numbers
            continue
        if any(not actions for actions in program.ranks):
            continue  # a rank without anything to do notices nothing
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
    return {number: _flat([p.grad for p in piece.parameters()]) for number, piece in enumerate(model)}


def _flat(gradients: list[Tensor | None]) -> list[list[float]]:
    return [[] if gradient is None else gradient.flatten().tolist() for gradient in gradients]


class Vanished(BaseException):
    """The rank is gone, as far as the others can see."""


_sockets: list[int] = []  # of the hub that was made last
_add_peer = _core.Hub.add_peer


def _noting(hub: Any, rank: int, descriptor: int) -> None:
    _sockets.append(descriptor)
    _add_peer(hub, rank, descriptor)


@contextlib.contextmanager
def linked(link: str) -> Iterator[None]:
    """For a while, schedules that connect go over this link, and their sockets are noted."""
    before = os.environ.get("PYPIPE_LINK")
    os.environ["PYPIPE_LINK"] = link
    _core.Hub.add_peer = _noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        _core.Hub.add_peer = _add_peer  # type: ignore[method-assign]
        if before is None:
            del os.environ["PYPIPE_LINK"]
        else:
            os.environ["PYPIPE_LINK"] = before


def _vanish() -> None:
    """What a SIGKILL does to the sockets; the process lives on, so that the next case can have it."""
    ends = [socket.socket(fileno=os.dup(descriptor)) for descriptor in _sockets]
    for end in ends:  # only this direction: this rank's own hub shall not see anything, and tell it
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_WR)
    for end in ends:
        end.close()
    raise Vanished


class Trial:
    """One rank's part of one case."""

    def __init__(self, case: Case, rank: int, group: Any) -> None:
        self.case, self.rank, self.group = case, rank, group
        self.program = case.program
        numbers = agreement.pieces(self.program, rank)
        self.modules = [(number, Piece(number)) for number in numbers]
        self.x, self.y = batch(case.n_microbatches)
        self.guilty = rank == case.culprit
        self.seen = Seen()

    def schedule(self, timeout: float, check: str | None) -> Any:
        count = n_pieces(self.program)
        stages = [pypipe.PipelineStage(module, number, count, CPU, group=self.group) for number, module in self.modules]
        return pypipe.Schedule(
            self.case.schedule, stages, self.case.n_microbatches, nn.functional.mse_loss, timeout=timeout, check=check
        )

    def step(self, schedule: Any) -> list[tuple[int, list[list[float]]]]:
        for _, module in self.modules:
            module.zero_grad()
        schedule.step(self.x, target=self.y)
        return [(number, _flat([p.grad for p in module.parameters()])) for number, module in self.modules]

    def run(self) -> Seen:
        fault = self.case.fault
        check = {"corrupt": "checksum", "nan": "nan"}.get(fault)
        _sockets.clear()
        schedule = self.schedule(SHORT if fault == "late" else PATIENCE, check)
        self.seen.before = self.step(schedule)
        dist.barrier(group=self.group)  # a fault would reach those that are still in this step
        if self.guilty:
            self.arm(schedule)
        try:
            for _ in range(3):  # a rank whose part of the step was over hears of it in the next one
                if fault == "leave" and self.guilty:
                    break
                schedule.step(self.x, target=self.y)
        except BaseException as error:
            self.seen.kind, self.seen.text = type(error).__name__, str(error)
            self.seen.notes = "\n".join(getattr(error, "__notes__", []))
            self.seen.rank, self.seen.action = getattr(error, "rank", None), getattr(error, "action", None)
            try:
                schedule.step(self.x, target=self.y)
            except pypipe.PipelineError as second:
                self.seen.again = str(second)
        schedule.close()
        for number, module in self.modules:
            module.load_state_dict(Piece(number).state_dict())
        with self.schedule(PATIENCE, None) as new:
            self.seen.after = self.step(new)
        return self.seen

    def arm(self, schedule: Any) -> None:
        """Puts the fault before one action of the culprit."""
        executor = schedule._pipeline._running.executors[True]
        kinds = {"corrupt": ("F", "B", "I"), "nan": ("F",), "late": ("F",)}.get(self.case.fault)
        stages = schedule._pipeline._running.stages
        places = []
        for index, action in enumerate(executor.actions):
            stage = stages[action.stage]
            channel = stage._receive_forward if action.kind.label == "F" else stage._receive_backward
            remote = hasattr(channel, "_port")
            if (kinds is None or action.kind.label in kinds) and (self.case.fault != "corrupt" or remote):
                places.append(index)
        index = places[int(self.case.place * len(places))]
        action = executor.actions[index]
        self.seen.at = str(action)
        code, call, microbatch = executor._plan[index]
        fault = self.fault(schedule, stages[action.stage], action)

        def faulty(number: int) -> None:
            fault()
            call(number)

        executor._plan[index] = (code, faulty, microbatch)

    def fault(self, schedule: Any, stage: Any, action: Any) -> Callable[[], None]:
        hub = schedule._pipeline._running.connection.hub
        match self.case.fault:
            case "raise":
                return functools.partial(_raise, ValueError(f"fault {self.case.seed}"))
            case "vanish":
                return _vanish
            case "late":
                return functools.partial(_be_late, stage._module, lambda: hub.cause() is not None)
            case "nan":
                return functools.partial(_spoil, stage._module)
            case "corrupt":
                channel = stage._receive_forward if action.kind.label == "F" else stage._receive_backward
                return functools.partial(_flip_next, channel._port, random.Random(self.case.seed))
        return lambda: None


def _raise(error: BaseException) -> None:
    raise error


def _spoil(module: nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))


def _be_late(module: nn.Module, ready: Callable[[], bool]) -> None:
    """The module's next forward takes until the others have had enough."""
    deadline = time.monotonic() + PATIENCE

    def wait(*_: Any) -> None:
        hook.remove()
        while not ready() and time.monotonic() < deadline:
            threading.Event().wait(0.01)

    hook = module.register_forward_pre_hook(wait)


def _flip_next(port: Any, source: random.Random) -> None:
    """Flips one bit of the next message that arrives."""
    receive = port.receive

    def flipping(tag: Any) -> Any:
        message = receive(tag)
        position, bit = source.randrange(WIDTH * 8), 1 << source.randrange(8)
        if hasattr(message, "buffer"):
            message.buffer[position] ^= bit
        else:
            memory = memoryview(message).cast("B")
            memory[position] ^= bit
        port.receive = receive
        return message

    port.receive = flipping


def run_cases(rank: int, size: int, group: Any, cases: list[Case]) -> list[Seen]:
    """Runs cases one after the other; the culprit's fault is over when this returns."""
    seen = []
    for case in cases:
        with linked(case.link):
            seen.append(Trial(case, rank, group).run())
    return seen


def judge(case: Case, everyone: list[Seen]) -> list[str]:
    """What is wrong with what the ranks saw."""
    found = []
    culprit = everyone[case.culprit]
    others = [(rank, seen) for rank, seen in enumerate(everyone) if rank != case.culprit]

    def expect(holds: bool, what: str, rank: int) -> None:
        if not holds:
            seen = everyone[rank]
            found.append(f"{case}, at {culprit.at}: rank {rank}: {what}: {seen.kind}: {seen.text[:600]} [{seen.notes}]")

    origin = {"raise": "ValueError", "vanish": "Vanished", "corrupt": "CorruptionError", "nan": "NonFiniteError"}
    kinds = {"vanish": "PeerLost", "leave": "PeerLost", "late": "PipelineTimeout"}
    expect(culprit.kind == origin.get(case.fault, kinds.get(case.fault) if case.fault == "late" else ""), "own", 0)
    if case.fault in ("raise", "corrupt", "nan"):
        expect(culprit.at in culprit.notes, "the note names the action", case.culprit)
    for rank, seen in others:
        expect(seen.kind == kinds.get(case.fault, "RemoteStageError"), "the kind of error", rank)
        if case.fault in ("raise", "corrupt", "nan"):
            expect((seen.rank, seen.action) == (case.culprit, culprit.at), "the first cause", rank)
            expect(origin[case.fault] in seen.text, "the origin's own words", rank)
        # Its sockets close one after the other here, so in between its hub may tell of the peers that hung up.
        if case.fault == "vanish" and f"rank {case.culprit} saw it first" not in seen.text:
            expect(f"rank {case.culprit} is gone" in seen.text, "who is gone", rank)
            expect(f"it was at {culprit.at}" in seen.text, "what it did last", rank)
        if case.fault == "leave":
            expect(f"rank {case.culprit} has left" in seen.text, "who left", rank)
        if case.fault == "late":
            expect(f"waits for rank {case.culprit}" in seen.text and "doing" in seen.text, "who is late", rank)
        expect("failed and cannot go on" in seen.again, "a second step() is refused", rank)
    want = expected(n_pieces(case.program), case.n_microbatches)
    for rank, seen in enumerate(everyone):
        for what in ("before", "after"):
            for number, flat in getattr(seen, what):
                pairs = [pair for p, q in zip(flat, want[number], strict=True) for pair in zip(p, q, strict=True)]
                worst = max(abs(a - b) for a, b in pairs)
                if not worst < 1e-12:
                    found.append(f"{case}: rank {rank}, piece {number}: gradients {what} the fault differ by {worst:g}")
    return found
