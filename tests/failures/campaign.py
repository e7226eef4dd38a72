"""The fault campaign: what one rank does and sees of a case, and whether that is right.

Every case trains a step (whose gradients are compared with the unpipelined model's), meets its fault in the next one,
and trains on with a new schedule over the same processes, where they all live. Nothing may be left of either schedule.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import campaign_faults
import leftovers
import torch
import torch.distributed as dist
from campaign_cases import Case, Piece, batch, flat, n_pieces
from campaign_faults import TIMEOUT, linked

import pypipe
from pypipe.runtime.diagnostics import status_table
from pypipe.runtime.rendezvous import agreement
from pypipe.runtime.transport.channel import ReceiveChannel
from pypipe.runtime.transport.links import nccl

SHORT = 0.5  # the timeout of those who wait for a rank that is late or stopped
CPU = torch.device("cpu")


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
    left: str = ""  # what was left when it was all over
    before: list[tuple[int, list[list[float]]]] = field(default_factory=list)  # gradients of the step before, by piece
    after: list[tuple[int, list[list[float]]]] = field(default_factory=list)  # of the first step of a new schedule


class Trial:
    """One rank's part of one case."""

    def __init__(self, case: Case, rank: int, group: Any) -> None:
        self.case, self.rank, self.group = case, rank, group
        self.program = case.program
        numbers = agreement.pieces(self.program, rank)
        self.modules = [(number, Piece(number)) for number in numbers]
        self.x, self.y = batch(case.n_microbatches)
        self.guilty = rank == case.culprit
        if self.guilty and case.fault == "hook":
            for _, module in self.modules:
                campaign_faults.with_hook(module)
        self.seen = Seen()

    def schedule(self, timeout: float, check: str | None) -> Any:
        count = n_pieces(self.program)
        stages = [pypipe.PipelineStage(module, number, count, CPU, group=self.group) for number, module in self.modules]
        return pypipe.Schedule(
            self.case.schedule, stages, self.case.n_microbatches, campaign_faults.loss, timeout=timeout, check=check
        )

    def step(self, schedule: Any) -> list[tuple[int, list[list[float]]]]:
        for _, module in self.modules:
            module.zero_grad()
        schedule.step(self.x, target=self.y)
        return [(number, flat([p.grad for p in module.parameters()])) for number, module in self.modules]

    def run(self) -> Seen:
        fault, seen = self.case.fault, self.seen
        check = {"corrupt": "checksum", "nan": "nan"}.get(fault)
        word = campaign_faults.Word(self.case) if fault in ("kill", "stop") else None
        campaign_faults.forget_sockets()
        before = leftovers.held()
        schedule = self.schedule(SHORT if fault in ("late", "stop") else TIMEOUT, check)
        with campaign_faults.no_hurry():
            seen.before = self.step(schedule)
        schedule._pipeline.recorder.core.set_busy("")
        dist.barrier(group=self.group)  # a fault would reach those that are still in this step
        if self.guilty:
            self.arm(schedule)
            if word is not None:
                word.give(seen.at)
        try:
            for _ in range(3):  # a rank whose part of the step was over hears of it in the next one
                if fault == "leave" and self.guilty:
                    break
                schedule.step(self.x, target=self.y)
        except BaseException as error:
            seen.kind, seen.text = type(error).__name__, str(error)
            seen.notes = "\n".join(getattr(error, "__notes__", []))
            seen.rank, seen.action = getattr(error, "rank", None), getattr(error, "action", None)
            try:
                schedule.step(self.x, target=self.y)
            except pypipe.PipelineError as second:
                seen.again = str(second)
        if word is not None and not self.guilty:
            seen.at = word.take()
            if fault == "stop":
                word.wake_up()
        schedule.close()
        if fault != "kill":
            for number, module in self.modules:
                module.load_state_dict(Piece(number).state_dict())
            with self.schedule(TIMEOUT, None) as new:
                seen.after = self.step(new)
        campaign_faults.forget_sockets()
        # A Work of c10d that the other rank never took up cannot be ended: its thread stays, with nothing else. And
        # gloo has threads of its own.
        threads = ("thread python", "thread pt_gloo") if self.case.link == "c10d" else ()
        seen.left = leftovers.left(before, without=threads)
        return seen

    def arm(self, schedule: Any) -> None:
        """Puts the fault before one action of the culprit."""
        executor = schedule._pipeline._running.executors[schedule._settings.n_microbatches, True]
        fault = self.case.fault
        kinds = {"corrupt": ("F", "B", "I"), "hook": ("B", "I")}.get(fault)
        if fault in ("nan", "late", "module", "loss"):
            kinds = ("F",)
        stages = schedule._pipeline._running.stages
        places = []
        for index, action in enumerate(executor.actions):
            stage = stages[action.stage]
            channel = stage._receive_forward if action.kind.label == "F" else stage._receive_backward
            remote = isinstance(channel, ReceiveChannel)
            possible = kinds is None or action.kind.label in kinds
            if fault == "corrupt":
                possible = possible and remote
            if fault == "loss":
                possible = possible and self.program.next_stage(action.stage) is None
            if possible:
                places.append(index)
        index = places[int(self.case.place * len(places))]
        action = executor.actions[index]
        self.seen.at = str(action)
        code, call, microbatch = executor._calls[index]
        strike = campaign_faults.make(self.case, schedule, stages[action.stage], action)

        def faulty(number: int) -> None:
            strike()
            call(number)

        executor._calls[index] = (code, faulty, microbatch)


@functools.cache
def _warm_up(link: str, size: int, group: Any) -> None:
    """What a process gets at its first step and keeps is nobody's leftover."""
    case = Case(0, "gpipe", size, 1, link, "none", -1, 0.0)
    for _ in range(2):
        trial = Trial(case, dist.get_rank(group), group)
        with trial.schedule(TIMEOUT, None) as schedule:
            trial.step(schedule)


def run_cases(rank: int, size: int, group: Any, cases: list[Case]) -> list[Seen]:
    """Runs cases one after the other; the culprit's fault is over when this returns."""
    seen = []
    for case in cases:
        # A close that waits for peers which are not going to close would take minutes.
        closing = patch.object(nccl.NcclTransport, "_CLOSING_SECONDS", 300.0)
        with linked(case.link), closing, patch.object(status_table, "_ANSWER_SECONDS", SHORT):
            _warm_up(case.link, size, group)
            seen.append(Trial(case, rank, group).run())
    return seen
