"""From a failure on one rank to an error on every rank.

The rank where something goes wrong first hands a *cause* (JSON) to its hub, which tells the neighbours, which tell
theirs. Every other rank turns the cause into an exception of its own.
"""

from __future__ import annotations

import json
import traceback
from typing import Any

from pypipe import _core
from pypipe.errors import MismatchError, PeerLost, PipelineError, PipelineTimeout, RemoteStageError
from pypipe.program import Action, Kind

__all__ = ["convert", "describe_action", "from_cause", "report", "text_of"]

_MOST_TEXT = 10_000  # characters of a traceback that travel; as JSON each may take 12 bytes, two make one frame
_VERBS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "the input half of its backward",
    Kind.W: "the weight half of its backward",
    Kind.SEND_F: "sending its output",
    Kind.SEND_B: "sending its input's gradient",
}


def describe_action(action: Action | None) -> str:
    """An action in words: `2F0 (stage 2, forward, microbatch 0)`."""
    if action is None:
        return "the end of the step"
    return (
        f"{action} (stage {action.stage}, {_VERBS.get(action.kind, action.kind.label)}, microbatch {action.microbatch})"
    )


def text_of(error: BaseException) -> str:
    """Type and message in one line; an exception may fail to print itself."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"a {type(error).__name__} that cannot be printed"


def report(
    hub: _core.Hub,
    rank: int,
    action: Action | None,
    error: BaseException,
    doing: str | None = None,
    stage: int | None = None,
) -> None:
    """Makes `error` the first cause, unless there is one, and tells the other ranks."""
    try:
        text = "".join(traceback.format_exception(error))
        message = str(error)
    except Exception:  # an exception may fail to print itself
        message = f"a {type(error).__name__} that cannot be printed"
        text = "Traceback (most recent call last):\n" + "".join(traceback.format_tb(error.__traceback__)) + message
    cause = {
        "kind": "error",
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
) -> PipelineError:
    """The public error for an error of the core, met while `action` was running."""
    doing = f"rank {rank}, at {doing or describe_action(action)}"
    text = hub.cause()
    if text is not None:
        return from_cause(text, doing)
    if error.fault == "timeout":
        return PipelineTimeout(f"{doing}: {error} within {timeout:g} s. Is that rank still alive and calling step()?")
    if error.fault == "peer_gone":
        return PeerLost(
            f"{doing}: {error}: it closed its schedule or ended while this rank still needed it. Every rank must call "
            "step() and eval() equally often"
        )
    if error.fault in ("mismatch", "protocol"):
        return MismatchError(f"{doing}: {error}")
    return PipelineError(f"{doing}: {error}")


def from_cause(text: str, doing: str) -> PipelineError:
    """The public error for what another rank (or this rank's hub) reported as the first cause."""
    try:
        cause: dict[str, Any] = json.loads(text)
        kind, origin = str(cause["kind"]), int(cause["rank"])
    except (ValueError, KeyError, TypeError):
        return PipelineError(f"{doing}: the pipeline failed: {text[:1000]}")
    if kind == "lost":
        return PeerLost(
            f"{doing}: rank {origin} is gone ({cause.get('how')}; rank {cause.get('seen_by')} saw it first): it was "
            "killed, crashed, or ended without closing its schedule. Look at that process's own output"
        )
    if kind == "link":
        message = f"{doing}: the link of rank {origin} failed: {cause.get('message')}"
        own = doing.startswith(f"rank {origin},")
        return PipelineError(message) if own else RemoteStageError(message, rank=origin)
    return RemoteStageError(
        f"{doing}: stopped because rank {origin} failed at {cause.get('doing')}: {cause.get('type')}: "
        f"{cause.get('message')}\n--- traceback of rank {origin} ---\n{cause.get('traceback', '')}",
        rank=origin,
        stage=cause.get("stage"),
        action=cause.get("action"),
        microbatch=cause.get("microbatch"),
        remote_traceback=str(cause.get("traceback", "")),
    )
