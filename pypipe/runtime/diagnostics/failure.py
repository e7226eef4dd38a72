"""Turns a failure on one rank into an error on every rank.

The rank where something goes wrong first hands a *cause* (the core's `Cause`) to its hub, which tells the neighbours,
which tell theirs. Every other rank turns the cause into an exception of its own.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from pypipe import _core
from pypipe.errors import MismatchError, PeerLost, PipelineError, PipelineTimeout, RemoteStageError
from pypipe.program import Action, Kind, Program
from pypipe.runtime.diagnostics import status_table
from pypipe.runtime.diagnostics.recorder import action_of

__all__ = [
    "Called",
    "convert",
    "describe_action",
    "from_cause",
    "is_inside_pypipe",
    "is_late",
    "report",
    "text_of",
    "timed_out",
]

_PACKAGE = Path(__file__).parents[2]
_MOST_TEXT = 10_000  # characters of a message or a traceback that travel; each takes at most 6 bytes, of 64 KiB
_VERBS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "the input half of its backward",
    Kind.W: "the weight half of its backward",
    Kind.SEND_F: "sending its output",
    Kind.SEND_B: "sending its input's gradient",
    Kind.UNSHARD: "gathering its parameters",
    Kind.RESHARD: "freeing its gathered parameters",
    Kind.REDUCE_GRAD: "reducing its gradients among its replicas",
}


class Called(NamedTuple):
    """A call of step() or eval(); ranks call them equally often.

    Attributes:
        number: counts from 1.
        name: how it reads, with its parentheses.
        training: whether it adds to gradients.
    """

    number: int
    name: str
    training: bool


def describe_action(action: Action | None) -> str:
    """An action in words: `2F0 (stage 2, forward, microbatch 0)`."""
    if action is None:
        return "the end of the step"
    which = "" if action.kind.is_per_stage else f", microbatch {action.microbatch}"
    return f"{action} (stage {action.stage}, {_VERBS.get(action.kind, action.kind.label)}{which})"


def text_of(error: BaseException) -> str:
    """Type and message in one line; an exception may fail to print itself."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"a {type(error).__name__} that cannot be printed"


def is_inside_pypipe(error: BaseException) -> bool:
    """Whether it arose in this package's own code, and not in a stage's."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and Path(frames[-1][0].f_code.co_filename).is_relative_to(_PACKAGE)


def _without_own_frames(error: BaseException) -> TracebackType | None:
    """Returns the traceback from where this package called a stage, a loss or a hook; what lies above is of no use."""
    frames = error.__traceback__
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE):
        frames = frames.tb_next
    return frames or error.__traceback__


def report(
    hub: _core.Hub,
    rank: int,
    action: Action | None,
    error: BaseException,
    doing: str | None = None,
    stage: int | None = None,
    called: Called | None = None,
    step: int = 0,
) -> None:
    """Makes `error` the first cause, unless there is one, and tells the other ranks.

    Args:
        called: the call in which it was raised; None: in none.
        step: of an error outside all calls, the first one that cannot go well for it; ranks that are in an earlier one
            still go on. 0: stops all of them.
    """
    frames = _without_own_frames(error)
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
        message = str(error)
    except Exception:  # an exception may fail to print itself
        message = f"a {type(error).__name__} that cannot be printed"
        text = "Traceback (most recent call last):\n" + "".join(traceback.format_tb(frames)) + message
    text = text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT // 2]}\n...\n{text[-_MOST_TEXT // 2 :]}"
    cause = _core.Cause(
        _cause_kind(error),
        rank,
        stage=stage if action is None else action.stage,
        action_kind=None if action is None else action.kind.order,
        microbatch=None if action is None else action.microbatch,
        doing=doing or (describe_action(action) if action else "the start or the end of a step"),
        call=0 if called is None else called.number,
        call_name="" if called is None else called.name,
        trains=called is not None and called.training,
        type=type(error).__name__,
        message=message[:_MOST_TEXT],
        traceback=text,
    )
    hub.abort(cause, step if called is None else called.number)


def _cause_kind(error: BaseException) -> _core.CauseKind:
    """Tells an error's kind of cause: an error that its rank is not to blame for keeps its type on the other ranks."""
    if isinstance(error, KeyboardInterrupt):
        return _core.CauseKind.INTERRUPT
    kinds: dict[type[BaseException], _core.CauseKind] = {
        PipelineTimeout: _core.CauseKind.TIMEOUT,
        PeerLost: _core.CauseKind.LEFT,
    }
    return kinds.get(type(error), _core.CauseKind.ERROR)


def convert(
    error: _core.CoreError,
    hub: _core.Hub,
    rank: int,
    action: Action | None,
    timeout: float,
    doing: str | None = None,
    size: int = 1,
    program: Program | None = None,
    returned: int = 0,
) -> PipelineError:
    """The public error for an error of the core, met while `action` was running.

    Args:
        returned: how many calls of step() and eval() this rank has returned from.
    """
    doing = f"rank {rank}, at {doing or describe_action(action)}"
    cause = hub.cause()
    if cause is not None:
        return from_cause(cause, doing, program, returned)
    if error.fault == "timeout":
        return timed_out(doing, f"{error} within {timeout:g} s.", hub, rank, size, program, returned)
    if error.fault == "peer_gone":
        return PeerLost(
            f"{doing}: {error}: it closed its schedule, or came to the end of its script, while this rank still needed "
            "it. Did it run out of data? Every rank must call step() and eval() equally often"
        )
    if error.fault in ("mismatch", "protocol"):
        return MismatchError(f"{doing}: {error}")
    return PipelineError(f"{doing}: {error}")


def timed_out(
    doing: str, problem: str, hub: _core.Hub, rank: int, size: int, program: Program | None, returned: int
) -> PipelineError:
    """The error of a rank that waited too long: with what every rank is doing."""
    found = status_table.survey(hub, size)
    cause = hub.cause()
    if cause is not None:  # another one that waits was first, and asked while all were there
        return from_cause(cause, doing, program, returned)
    return PipelineTimeout(f"{doing}: {problem} {status_table.table(found, size, rank, program)}\n{_BUSY}")


_BUSY = 'Work that may take longer than the timeout can say so: `with schedule.busy("..."):`'


def _call_of(cause: _core.Cause) -> Called | None:
    """The call in which the cause arose; None where it arose in none, or that is not known."""
    if cause.kind == _core.CauseKind.LOST:  # what the rank's record says
        status = cause.reports[0].status if cause.reports else None
        return Called(status.step, "call", False) if status is not None and status.now is not None else None
    return Called(cause.call, cause.call_name, cause.trains) if cause.call else None


def is_late(cause: _core.Cause, returned: int) -> bool:
    """Whether a cause arose in a call that this rank had returned from by then.

    Args:
        cause: the first cause.
        returned: how many calls of step() and eval() this rank has returned from.
    """
    called = _call_of(cause)
    return called is not None and called.number <= returned


_WHOLE_PART = (
    "pypipe: this rank's part of that step was whole; what was done with its gradients since then, such as an "
    "optimizer's step, stays as it is"
)


def from_cause(cause: _core.Cause, doing: str, program: Program | None = None, returned: int = 0) -> PipelineError:
    """The public error for what another rank (or this rank's hub, or its links) reported as the first cause.

    Args:
        cause: the first cause.
        doing: this rank, and what it was doing.
        program: what runs, where that is known.
        returned: how many calls of step() and eval() this rank has returned from; where the cause arose in one of
            these, the error says so.
    """
    called = _call_of(cause)
    if called is None or called.number > returned:
        ahead = called is not None and called.number > returned + 1
        stopped = f"stopped because a later {called.name} failed: " if called and ahead else "stopped because "
        return _from_cause(cause, doing, stopped, program)
    ago = returned - called.number
    which = f"the last {called.name}" if ago == 0 else f"the {called.name} {ago} before the last call"
    late = f"{which} failed on rank {cause.rank} after this rank had returned from it"
    error = _from_cause(cause, f"{doing}: {late}", "", program)
    if called.training:
        error.add_note(_WHOLE_PART)
    return error


def _from_cause(cause: _core.Cause, doing: str, stopped: str, program: Program | None) -> PipelineError:
    kinds, kind, origin = _core.CauseKind, cause.kind, cause.rank
    if kind == kinds.LOST:
        last = f"; {status_table.last_words(cause.reports[0].status)}" if cause.reports else ""
        return PeerLost(
            f"{doing}: rank {origin} is gone ({cause.message}; rank {cause.seen_by} saw it first{last}): it was "
            "killed, crashed, or ended without closing its schedule. Look at that process's own output"
        )
    if kind == kinds.TIMEOUT:
        return PipelineTimeout(f"{doing}: {stopped}a rank waited too long: {cause.message}")
    if kind == kinds.OVERDUE:  # csrc/link/nccl/nccl_watchdog.cpp
        table = status_table.table(status_table.known(cause.reports), cause.ranks, origin, program, waits=False)
        return PipelineTimeout(
            f"{doing}: on rank {origin} {cause.message} within {cause.limit:g} s: the other end has not started its "
            f"part, or the device is stuck. {table}\n{_BUSY}"
        )
    if kind == kinds.LEFT:
        return PeerLost(f"{doing}: {stopped}a rank left: {cause.message}")
    if kind == kinds.LINK:
        message = f"{doing}: the link of rank {origin} failed: {cause.message}"
        own = doing.startswith(f"rank {origin},")
        return PipelineError(message) if own else RemoteStageError(message, rank=origin)
    if kind == kinds.INTERRUPT:
        message = f"{doing}: {stopped}rank {origin} was interrupted (KeyboardInterrupt) at {cause.doing}"
    else:
        message = (
            f"{doing}: {stopped}rank {origin} failed at {cause.doing}: {cause.type}: {cause.message}\n"
            f"--- traceback of rank {origin} ---\n{cause.traceback}"
        )
    action = None
    if cause.stage is not None and cause.action_kind is not None and cause.microbatch is not None:
        action = action_of(cause.stage, cause.action_kind, cause.microbatch)
    return RemoteStageError(
        message,
        rank=origin,
        stage=cause.stage,
        action=None if action is None else str(action),
        microbatch=cause.microbatch,
        remote_traceback=cause.traceback,
    )
