"""What every rank is doing, in words: for the errors of those that waited too long, or that lost a peer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pypipe import _core
from pypipe.program import Action, Kind, Program
from pypipe.runtime.diagnostics.recorder import action_of

__all__ = ["known", "last_words", "survey", "table"]

_ANSWER_SECONDS = 1.0

# As csrc/control/recorder.cpp writes it. "silent": it did not answer, its record did; "left": it has said goodbye.
Activity = dict[str, Any]


def survey(hub: _core.Hub, size: int) -> dict[int, Activity]:
    """Asks every rank what it is doing; waits a second at most. Ranks that nothing is known of are missing."""
    answers = hub.ask(size, _core.Patience(_ANSWER_SECONDS))
    found = known([(json.loads(text), silent) for text, silent in answers])
    for rank in hub.departed():
        if rank in found:
            found[rank]["left"] = True
    return found


def known(answers: Iterable[tuple[Activity, bool]]) -> dict[int, Activity]:
    """What ranks answered, or their records show, by rank."""
    return {activity["rank"]: {**activity, "silent": silent} for activity, silent in answers}


def table(found: Mapping[int, Activity], size: int, me: int, program: Program | None, *, waits: bool = True) -> str:
    """One line for each rank, and before them who it is that the others wait for.

    Args:
        found: what is known of the ranks.
        size: how many there are.
        me: the rank that asks.
        program: what runs, where that is known.
        waits: whether it asks because it waits itself.
    """
    rows = [("rank", "step", "doing", "for", "completed last")]
    awaited = {rank: _waits_for(activity, program) for rank, activity in found.items() if not activity["silent"]}
    for rank in range(size):
        activity = found.get(rank)
        if activity is None:
            rows.append((str(rank), "?", "DOES NOT ANSWER", "", ""))
            continue
        doing, seconds = _doing(activity, awaited.get(rank), waits and rank == me)
        if activity.get("left"):
            doing, seconds = "has left: it closed its schedule", ""
        elif activity["silent"]:
            doing = f"DOES NOT ANSWER (its record: {doing})"
        rows.append((str(rank), str(activity["step"]), doing, seconds, _completed(activity)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([_blame(found, size, me, awaited), *lines])


def last_words(activity: Activity) -> str:
    """What a rank that is gone did last: `it was running 1F3, after 1F2`."""
    now, last = _action(activity.get("now")), _action(activity.get("last"))
    doing = f"it was at {now}" if now else "it was between steps" if activity.get("step") else "it had begun no step"
    return doing + (f", after {last}" if last else "") + (f", in its step {activity['step']}" if now else "")


def _action(deed: Mapping[str, Any] | None) -> Action | None:
    return None if deed is None else action_of(int(deed["stage"]), int(deed["kind"]), int(deed["microbatch"]))


def _waits_for(activity: Activity, program: Program | None) -> tuple[int, str] | None:
    """The rank that it waits for, and what for; None where it computes, or does something else."""
    action = _action(activity["now"])
    if action is None or program is None or activity["now"]["ready"] or action.stage >= len(program.placement):
        return None
    before, after = program.previous_stage(action.stage), program.next_stage(action.stage)
    match action.kind:
        case Kind.F | Kind.RECV_F:
            source, what = before, f"{before}F{action.microbatch}"
        case Kind.B | Kind.I | Kind.RECV_B:
            source, what = after, f"the gradient of {after}B{action.microbatch}"
        case Kind.SEND_F:
            source, what = after, "room for the message"
        case Kind.SEND_B:
            source, what = before, "room for the message"
        case _:
            return None
    if source is None or program.placement[source] == program.placement[action.stage]:
        return None
    return program.placement[source], what


def _doing(activity: Activity, waits: tuple[int, str] | None, asking: bool) -> tuple[str, str]:
    now, last = activity["now"], activity["last"]
    if "busy" in activity:
        return f"busy: {activity['busy']}", _seconds(activity["busy_for"])
    if now is not None:
        action = _action(now)
        if waits is not None:
            return f"{action}: waits for {waits[1]} from rank {waits[0]}", _seconds(now["ago"])
        return f"{action}: waits" if asking else f"{action}: runs", _seconds(now["ago"])
    if not activity["step"]:
        return "has begun no step", ""
    if last is not None and last["step"] == activity["step"]:
        return "between steps: has not called step() or eval() again", _seconds(last["ago"])
    return "at the start of a step", ""


def _completed(activity: Activity) -> str:
    last = activity["last"]
    return f"{_action(last)}, {_seconds(last['ago'])} ago" if last is not None else "nothing"


def _seconds(value: float) -> str:
    return f"{value:.1f} s"


def _blame(found: Mapping[int, Activity], size: int, me: int, waits: Mapping[int, tuple[int, str] | None]) -> str:
    """Follows who waits for whom, from this rank to one that waits for nobody."""
    rank, seen = me, [me]
    while (waited := waits.get(rank)) is not None:
        rank = waited[0]
        if rank in seen:
            return f"Ranks {', '.join(map(str, [*seen[seen.index(rank) :], rank]))} wait for each other."
        seen.append(rank)
    if rank == me:
        return "What each rank is doing:"
    through = "".join(f", through rank {between}" for between in seen[1:-1])
    activity = found.get(rank)
    if activity is not None and activity.get("left"):
        return f"It waits for rank {rank}{through}, which has left: it closed its schedule."
    if activity is None or activity["silent"]:
        return f"It waits for rank {rank}{through}, which does not answer: is it stopped, or its host gone?"
    return f"It waits for rank {rank}{through}: {_doing(activity, None, False)[0]}."
