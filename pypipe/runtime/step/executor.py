"""Runs one rank's list of actions. There is one executor; what differs between schedules is the list."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from pypipe.program import Action, Channel, Kind, Link, Program, channel_of
from pypipe.program.single_communicator.groups import ends_of_groups
from pypipe.runtime.diagnostics.device_clock import DeviceClock
from pypipe.runtime.diagnostics.recorder import Recorder, code_of
from pypipe.runtime.step.stage_execution import StageExecution

__all__ = ["Executor"]

Step = tuple[int, Callable[[int], None], int]


class Executor:
    """Runs a lowered, verified program on one rank.

    Args:
        program: the program, with its transfers.
        rank: this rank.
        stages: the stages that this rank holds, by their number in the program.
        recorder: notes each action as it begins.
        issue: called after each group of transfers, where they are held back until then.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, StageExecution],
        recorder: Recorder,
        issue: Callable[[], None] | None = None,
    ) -> None:
        self.program = program
        self._record = recorder.core
        self._stages = tuple(stages.values())
        for each in self._stages:
            each.on_ready = recorder.core.ready
        # Everything that can be known before is done here: run() only calls.
        self.actions: list[Action] = []
        """What the recorder is told of in a run, in order."""
        self._plan: list[Step] = []
        order = _LinkOrder(program, rank)
        actions = program.ranks[rank]
        ends = [False] * len(actions) if issue is None else ends_of_groups(program, rank)
        for action, ends_group in zip(actions, ends, strict=True):
            stage, kind, microbatch = stages[action.stage], action.kind, action.microbatch
            if kind.is_receive:
                channel = stage.receiver(Kind.F if kind is Kind.RECV_F else Kind.B)
                if channel.posts:  # else the slot's return to the sender is all that it waits for
                    self._add(action, channel.post, microbatch)
            else:
                for early, earlier in order.before(action):
                    self._add(action, stages[early.target_stage].receiver(early.kind).take, earlier)
                if action.kind is Kind.SEND_B and self._plan and self._plan[-1][1:] == (stage.backward, microbatch):
                    self._plan[-1] = (self._plan[-1][0], stage.backward_before_send, microbatch)
                self._add(action, _call(action, stage), microbatch)
            if ends_group and issue is not None:
                self._add(action, _ignoring_microbatch(issue), microbatch)
        self._position = 0

    def _add(self, action: Action, call: Callable[[int], None], microbatch: int) -> None:
        self.actions.append(action)
        self._plan.append((code_of(action), call, microbatch))

    @property
    def action(self) -> Action | None:
        """What is being done, or was being done when it failed."""
        return self.actions[self._position] if self._position < len(self.actions) else None

    @property
    def added(self) -> str | None:
        """What this run has added to `.grad`, in words; None where it has added nothing."""
        parts = [stage.added for stage in self._stages if stage.has_gradients]
        whole, early = sum(each.whole for each in parts), sum(each.early for each in parts)
        unsure = any(each.unsure for each in parts)
        backwards = {(a.stage, a.microbatch) for a in self.actions if a.kind in (Kind.B, Kind.I)}
        if not backwards or not (whole or early or unsure):
            return None
        words = f"{whole} of {len(backwards)} backwards have been added to .grad"
        if early:
            words += f", and of {early} more those gradients that are computed in action I"
        return words + (", and perhaps a part of the one that failed" if unsure else "")

    def run(self, clock: DeviceClock | None = None) -> None:
        """Runs every action, in order.

        Args:
            clock: is told of what is issued to the device, where that is to be measured.

        Raises:
            CoreError: the pipeline has failed, which is looked at before each action and after the last one; or what
                an action raises.
        """
        if clock is not None:
            self._run_timed(clock)
            return
        position = 0
        begin = self._record.begin
        try:
            for code, call, microbatch in self._plan:
                begin(code)
                call(microbatch)
                position += 1
            self._record.end()  # the action that fails stays in progress, for the record
        finally:
            self._position = position

    def _run_timed(self, clock: DeviceClock) -> None:
        plan = self._plan
        arrived = self._record.ready

        def ready() -> None:
            arrived()
            clock.ready()

        def timed(call: Callable[[int], None]) -> Callable[[int], None]:
            def run(microbatch: int) -> None:
                clock.begin()
                call(microbatch)
                clock.end()

            return run

        self._plan = [(code, timed(call), microbatch) for code, call, microbatch in plan]
        try:
            for stage in self._stages:
                stage.on_ready = ready
            self.run()
        finally:
            self._plan = plan
            for stage in self._stages:
                stage.on_ready = arrived


class _LinkOrder:
    """What a rank's links carry, in order, while its list is walked.

    A link is a FIFO. Where it carries several channels, or a program uses messages in another order than they come in,
    whatever comes before the message that is to be used has to be taken off the link first.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self._program = program
        self._coming: dict[Link, deque[tuple[Channel, int]]] = {}
        self._taken: set[tuple[Channel, int]] = set()
        for action in program.ranks[rank]:
            if action.kind.is_receive:
                channel = channel_of(action)
                self._coming.setdefault(program.link_of(channel), deque()).append((channel, action.microbatch))

    def before(self, action: Action) -> list[tuple[Channel, int]]:
        """The messages to take off the link before the one that this F, B or I uses."""
        program, stage = self._program, action.stage
        if action.kind is Kind.F:
            kind, source = Kind.F, program.previous_stage(stage)
        elif action.kind in (Kind.B, Kind.I):
            kind, source = Kind.B, program.next_stage(stage)
        else:
            return []
        if source is None or program.placement[source] == program.placement[stage]:
            return []
        message = (Channel(kind, source, stage), action.microbatch)
        if message in self._taken:
            self._taken.remove(message)
            return []
        coming = self._coming[program.link_of(message[0])]
        early = []
        while (next_one := coming.popleft()) != message:
            early.append(next_one)
        self._taken.update(early)
        return early


def _ignoring_microbatch(call: Callable[[], None]) -> Callable[[int], None]:
    return lambda microbatch: call()


def _call(action: Action, stage: StageExecution) -> Callable[[int], None]:
    match action.kind:
        case Kind.F:
            return stage.forward
        case Kind.B:
            return stage.backward
        case Kind.I:
            return stage.input_backward
        case Kind.W:
            return stage.weight_backward
        case Kind.SEND_F:
            return stage.send_forward
        case Kind.SEND_B:
            return stage.send_backward
        case Kind.UNSHARD:
            return stage.unshard
        case Kind.REDUCE_GRAD:
            return stage.reduce_gradients
        case Kind.RESHARD:
            return stage.reshard
    raise ValueError(f"the executor cannot run {action}")
