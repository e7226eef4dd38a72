"""What a rank did last: a ring of its latest actions, fed by the executor, always on.

The ring belongs to the core, so that the control sockets' thread can report it to other ranks while this rank computes,
sleeps or is stuck (csrc/control/action_log.hpp has its layout and its protocol). With PYPIPE_RECORD_DIR it lies in a
file there, which survives a failed pipeline or a killed process; `pypipe show --record` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pypipe import _core
from pypipe.program import Action, Kind

__all__ = ["CAPACITY", "SUFFIX", "ActionRecord", "Record", "Recorder", "action_of", "code_of", "read"]

CAPACITY = 512
"""Actions that are kept of each rank."""

SUFFIX = ".pypipe-record"

_KINDS = {kind.order: kind for kind in Kind}


class ActionRecord(NamedTuple):
    """One action that a rank did or is doing. Times are nanoseconds of CLOCK_MONOTONIC."""

    action: Action
    start: int
    end: int  # 0: in progress
    ready: int  # when it had the message that it waited for; 0: it waited for none, or has not got it
    step: int  # the rank's step() and eval() calls count from 1


class Record(NamedTuple):
    """A record file."""

    rank: int
    clock: int  # nanoseconds to add to an action's times for the time since the epoch
    actions: list[ActionRecord]
    busy: str | None  # what it said it was busy with
    cause: _core.Cause | None  # the first cause of the pipeline's failure


def code_of(action: Action) -> int:
    """The action as the core's recorder takes it."""
    return action.stage << 40 | action.kind.order << 32 | action.microbatch


def action_of(stage: int, kind: int, microbatch: int) -> Action | None:
    """The action of these numbers; None where there is no such kind."""
    return Action(stage, _KINDS[kind], microbatch) if kind in _KINDS else None


class Recorder:
    """One rank's record.

    Args:
        rank: this rank.
        capacity: how many actions it keeps.
        path: the file to keep them in; "": anonymous memory.
    """

    def __init__(self, rank: int, capacity: int = CAPACITY, path: str = "") -> None:
        self.core = _core.ActionLog(rank, capacity, path)

    def actions(self) -> list[ActionRecord]:
        """The latest actions, the oldest first; the last one may be in progress."""
        return _records(self.core.actions())

    def start_trace(self, capacity: int) -> None:
        """From now on keeps every action apart from the ring too, up to `capacity` of them. Only between steps."""
        self.core.start_trace(capacity)

    def stop_trace(self) -> list[ActionRecord]:
        """Every action since start_trace(), in order."""
        return _records(self.core.stop_trace())


def _records(entries: Iterable[_core.ActionEntry]) -> list[ActionRecord]:
    found = []
    for entry in entries:
        action = action_of(entry.stage, entry.kind, entry.microbatch)
        if action is not None:
            found.append(ActionRecord(action, entry.start, entry.end, entry.ready, entry.step))
    return found


def read(path: Path) -> Record:
    """Reads a record file, also one whose rank still writes to it.

    Raises:
        ValueError: it cannot be read, or is not a record of this version.
    """
    try:
        file = _core.read_record(str(path))
        cause = file.cause
    except _core.CoreError as error:
        raise ValueError(str(error)) from error
    return Record(file.rank, file.clock, _records(file.actions), file.busy, cause)
