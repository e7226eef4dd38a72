"""From a failure on one rank to an error on every rank.

The rank where something goes wrong first hands a *cause* (JSON) to its hub, which tells the neighbours, which tell
theirs. Every other rank turns the cause into an exception of its own.
"""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from pypipe import _core
from pypipe.errors import MismatchError, PeerLost, PipelineError, PipelineTimeout, RemoteStageError
from pypipe.program import Action, Kind, Program
from pypipe.runtime import situation

__all__ = ["convert", "describe_action", "from_cause", "is_inside_pypipe", "report", "text_of", "timed_out"]

_PACKAGE = Path(__file__).parents[1]
_MOST_TEXT = 10_000  # characters of a traceback that travel; as JSON each may take 12 bytes, two make one frame
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
    """The traceback from where this package called a stage, a loss or a hook: how it came there says nothing."""
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
) -> None:
    """Makes `error` the first cause, unless there is one, and tells the other ranks."""
    frames = _without_own_frames(error)
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
        message = str(error)
    except Exception:  # an exception may fail to print itself
        message = f"a {type(error).__name__} that cannot be printed"
        text = "Traceback (most recent call last):\n" + "".join(traceback.format_tb(frames)) + message
    kinds: dict[type[BaseException], str] = {PipelineTimeout: "timeout", PeerLost: "left"}
    cause = {
        # What is no rank's own fault is raised on the others as what it is.
        "kind": "interrupt" if isinstance(error, KeyboardInterrupt) else kinds.get(type(error), "error"),
        "rank": rank,
        "stage": stage if action is None else action.stage,
        "action": str(action) if action else None,
        "microbatch": action.microbatch if action else None,
        "doing": doing or (describe_action(action) if action else "the start or the end of a step"),
        "type": type(error).__name__,
        "message": message[:_MOST_TEXT],
        "traceback": text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT // 2]}\n...\n{text[-_MOST_TEXT // 2 :]}",
    }
    hub.abort(json.dumps(cause))


def convert(
    error: _core.CoreError,
    hub: _core.Hub,
    rank: int,
    action: Action | None,
    timeout: float,
    doing: str | None = None,
    size: int = 1,
    program: Program | None = None,
) -> PipelineError:
    """The public error for an error of the core, met while `action` was running."""
    doing = f"rank {rank}, at {doing or describe_action(action)}"
    text = hub.cause()
    if text is not None:
        return from_cause(text, doing, program)
    if error.fault == "timeout":
        return timed_out(doing, f"{error} within {timeout:g} s.", hub, rank, size, program)
    if error.fault == "peer_gone":
        return PeerLost(
            f"{doing}: {error}: it closed its schedule, or came to the end of its script, while this rank still needed "
            "it. Did it run out of data? Every rank must call step() and eval() equally often"
        )
    if error.fault in ("mismatch", "protocol"):
        return MismatchError(f"{doing}: {error}")
    return PipelineError(f"{doing}: {error}")


def timed_out(doing: str, problem: str, hub: _core.Hub, rank: int, size: int, program: Program | None) -> PipelineError:
    """The error of a rank that waited too long: with what every rank is doing."""
    found = situation.survey(hub, size)
    text = hub.cause()
    if text is not None:  # another one that waits was first, and asked while all were there
        return from_cause(text, doing, program)
    return PipelineTimeout(f"{doing}: {problem} {situation.table(found, size, rank, program)}\n{_BUSY}")


_BUSY = 'Work that may take longer than the timeout can say so: `with schedule.busy("..."):`'


def from_cause(text: str, doing: str, program: Program | None = None) -> PipelineError:
    """The public error for what another rank (or this rank's hub, or its links) reported as the first cause."""
    try:
        cause: dict[str, Any] = json.loads(text)
        kind, origin = str(cause["kind"]), int(cause["rank"])
    except (ValueError, KeyError, TypeError):
        return PipelineError(f"{doing}: the pipeline failed: {text[:1000]}")
    if kind == "lost":
        status = cause.get("status")
        last = f"; {situation.last_words(status)}" if isinstance(status, dict) else ""
        return PeerLost(
            f"{doing}: rank {origin} is gone ({cause.get('how')}; rank {cause.get('seen_by')} saw it first{last}): it "
            "was killed, crashed, or ended without closing its schedule. Look at that process's own output"
        )
    if kind == "timeout":
        return PipelineTimeout(f"{doing}: stopped because a rank waited too long: {cause.get('message')}")
    if kind == "overdue":  # csrc/link/nccl_watchdog.cpp
        try:
            found = situation.known(cause["found"])
            table = situation.table(found, int(cause["ranks"]), origin, program, waits=False)
            seconds = float(cause["seconds"])
            problem = (
                f"on rank {origin} {cause['message']} within {seconds:g} s: the other end has not started its part, or "
                f"the device is stuck. {table}"
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return PipelineError(f"{doing}: the pipeline failed: {text[:1000]}")
        return PipelineTimeout(f"{doing}: {problem}\n{_BUSY}")
    if kind == "left":
        return PeerLost(f"{doing}: stopped because a rank left: {cause.get('message')}")
    if kind == "link":
        message = f"{doing}: the link of rank {origin} failed: {cause.get('message')}"
        own = doing.startswith(f"rank {origin},")
        return PipelineError(message) if own else RemoteStageError(message, rank=origin)
    if kind == "interrupt":
        message = f"{doing}: stopped because rank {origin} was interrupted (KeyboardInterrupt) at {cause.get('doing')}"
    else:
        message = (
            f"{doing}: stopped because rank {origin} failed at {cause.get('doing')}: {cause.get('type')}: "
            f"{cause.get('message')}\n--- traceback of rank {origin} ---\n{cause.get('traceback', '')}"
        )
    return RemoteStageError(
        message,
        rank=origin,
        stage=cause.get("stage"),
        action=cause.get("action"),
        microbatch=cause.get("microbatch"),
        remote_traceback=str(cause.get("traceback", "")),
    )
