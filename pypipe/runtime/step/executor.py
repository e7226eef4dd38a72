"""Runs one rank's list of actions. There is one executor; what differs between schedules is the list."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pypipe.program import Action, Kind, Program
from pypipe.runtime.diagnostics.device_clock import DeviceClock
from pypipe.runtime.diagnostics.recorder import Recorder
from pypipe.runtime.step.calls import plan_calls
from pypipe.runtime.step.stage_execution import StageExecution

__all__ = ["Executor"]


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
        self._by_number = stages
        self._stages = tuple(stages.values())
        for each in self._stages:
            each.on_ready = recorder.core.ready
        self.actions, self._calls = plan_calls(program, rank, stages, issue)
        """What the recorder is told of in a run, in order."""
        self._position = 0

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
        words = f"{whole} of {len(backwards)} backwards"
        if early:
            words += f", and of {early} more the gradients that action I computes"
        return words + (", and perhaps part of the one that failed" if unsure else "")

    def take_part(self, reason: str, *, training: bool, has_begun: bool) -> None:
        """After a step that failed: does what this rank's replicas in other pipelines wait for, in the program's order.

        Args:
            reason: why it has failed, in one line.
            training: whether it was one of step().
            has_begun: whether run() was called.
        """
        for stage in self._stages:
            stage.begin_replicas(training=training)
        for action in self.actions[self._position if has_begun else 0 :]:
            self._by_number[action.stage].take_part(action.kind, reason)

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
            for code, function, microbatch in self._calls:
                begin(code)
                function(microbatch)
                position += 1
            self._record.end()  # the action that fails stays in progress, for the record
        finally:
            self._position = position

    def _run_timed(self, clock: DeviceClock) -> None:
        calls = self._calls
        arrived = self._record.ready

        def ready() -> None:
            arrived()
            clock.ready()

        def timed(function: Callable[[int], None]) -> Callable[[int], None]:
            def run(microbatch: int) -> None:
                clock.begin()
                function(microbatch)
                clock.end()

            return run

        self._calls = [call._replace(function=timed(call.function)) for call in calls]
        try:
            for stage in self._stages:
                stage.on_ready = ready
            self.run()
        finally:
            self._calls = calls
            for stage in self._stages:
                stage.on_ready = arrived
