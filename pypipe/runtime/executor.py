"""Runs one rank's list of actions. There is one executor; what differs between schedules is the list."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pypipe.program import Action, Kind, Program
from pypipe.runtime.execution import StageExecution

__all__ = ["Executor"]


class Executor:
    """Runs a lowered, verified program on one rank.

    Args:
        program: the program, with its transfers.
        rank: this rank.
        stages: the stages that this rank holds.
    """

    def __init__(self, program: Program, rank: int, stages: Mapping[int, StageExecution]) -> None:
        # Over most links a receive is posted by the slot's return to the sender; then RECV has nothing left to do.
        self._actions = [
            action
            for action in program.ranks[rank]
            if not action.kind.is_receive or stages[action.stage].posts(action.kind)
        ]
        self._plan = [(_call(action, stages[action.stage]), action.microbatch) for action in self._actions]
        self._position = 0

    @property
    def action(self) -> Action | None:
        """What is being done, or was being done when it failed."""
        return self._actions[self._position] if self._position < len(self._actions) else None

    def run(self) -> None:
        """Runs every action, in order."""
        position = 0
        try:
            for call, microbatch in self._plan:
                call(microbatch)
                position += 1
        finally:
            self._position = position


def _call(action: Action, stage: StageExecution) -> Callable[[int], None]:
    match action.kind:
        case Kind.F:
            return stage.forward
        case Kind.B:
            return stage.backward
        case Kind.SEND_F:
            return stage.send_forward
        case Kind.SEND_B:
            return stage.send_backward
        case Kind.RECV_F | Kind.RECV_B:
            return stage.receiver(action.kind).post
    raise ValueError(f"the executor cannot run {action}: it knows F, B and their transfers")
