"""What a rank did last: a ring of its latest actions, fed by the executor, always on.

The ring belongs to the core, so that the control sockets' thread can tell other ranks of it while this rank computes,
sleeps or is stuck (csrc/control/recorder.hpp has its layout and its protocol). With PYPIPE_RECORD_DIR it lies in a
file there, which stays when the pipeline fails or the process is killed; `pypipe show --record` reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pypipe import _core
from pypipe.program import Action, Kind

__all__ = ["CAPACITY", "SUFFIX", "Deed", "Record", "Recorder", "action_of", "code_of", "read"]

CAPACITY = 512
"""Actions that are kept of each rank."""

SUFFIX = ".pypipe-record"

_KINDS = {kind.order: kind for kind in Kind}
_HEADER = struct.Struct("=QIIQQQQQQQQ96s")
_HEADER_BYTES = 256
_ENTRY = struct.Struct("=5Q")
_MAGIC = 0x3130636552795079


class Deed(NamedTuple):
    """One action that a rank did or is doing. Times are nanoseconds of CLOCK_MONOTONIC."""

    action: Action
    start: int
    end: int  # 0: in progress
    ready: int  # when it had the message that it waited for; 0: it waited for none, or has not got it
    step: int  # the rank's step() and eval() calls count from 1


class Record(NamedTuple):
    """A record file."""

    rank: int
    clock: int  # add this to a Deed's times to get nanoseconds since the epoch
    deeds: Sequence[Deed]
    busy: str | None  # what it said it was busy with
    cause: str | None  # the first cause of the pipeline's failure, as JSON


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
        self.core = _core.Recorder(rank, capacity, path)

    def deeds(self) -> list[Deed]:
        """The latest actions, the oldest first; the last one may be in progress."""
        return _deeds(self.core.deeds())

    def start_trace(self, capacity: int) -> None:
        """From now on keeps every action apart from the ring too, up to `capacity` of them. Only between steps."""
        self.core.start_trace(capacity)

    def stop_trace(self) -> list[Deed]:
        """Every action since start_trace(), in order."""
        return _deeds(self.core.stop_trace())


def _deeds(tuples: Sequence[tuple[int, int, int, int, int, int, int]]) -> list[Deed]:
    found = []
    for stage, kind, microbatch, step, start, ready, end in tuples:
        action = action_of(stage, kind, microbatch)
        if action is not None:
            found.append(Deed(action, start, end, ready, step))
    return found


def read(path: Path) -> Record:
    """Reads a record file, also one whose rank still writes to it.

    Raises:
        ValueError: it is no record.
    """
    data = path.read_bytes()
    if len(data) < _HEADER_BYTES:
        raise ValueError(f"{path} is no record of pypipe: it has {len(data)} bytes")
    magic, rank, capacity, clock, cause_at, cause_bytes, cursor, _, _, busy_since, _, work = _HEADER.unpack_from(data)
    if magic != _MAGIC or cause_at != _HEADER_BYTES + capacity * _ENTRY.size or len(data) < cause_at:
        raise ValueError(f"{path} is no record of this version of pypipe")
    tuples = []
    for number in range(max(0, cursor - capacity + 1), cursor):  # the one before may be half overwritten
        what, step, start, ready, end = _ENTRY.unpack_from(data, _HEADER_BYTES + number % capacity * _ENTRY.size)
        tuples.append((what >> 40, what >> 32 & 0xFF, what & 0xFFFFFFFF, step, start, ready, end))
    text = work.split(b"\0")[0].decode(errors="replace") if busy_since else None
    cause = data[cause_at : cause_at + cause_bytes].decode(errors="replace") if cause_bytes else None
    return Record(rank, clock, _deeds(tuples), text, cause)
