"""Says in words what every rank is doing, for the errors of ranks that waited too long or lost a peer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pypipe import _core
from pypipe.program import Action, Kind, Program
from pypipe.runtime.diagnostics.recorder import action_of

__all__ = ["Known", "known", "last_words", "survey", "table"]

_ANSWER_SECONDS = 1.0


class Known(NamedTuple):
    """What is known of a rank.

    Attributes:
        status: what it is doing.
        silent: whether it did not answer, so that the status is what its record says.
        left: whether it has said goodbye.
    """

    status: _core.RankStatus
    silent: bool = False
    left: bool = False


def survey(hub: _core.Hub, size: int) -> dict[int, Known]:
    """Asks every rank what it is doing; waits a second at most. Ranks that nothing is known of are missing."""
    found = known(hub.ask(size, _core.WaitPolicy(_ANSWER_SECONDS)))
    for rank in hub.departed():
        if rank in found:
            found[rank] = found[rank]._replace(left=True)
    return found


def known(reports: Iterable[_core.RankReport]) -> dict[int, Known]:
    """What ranks answered, or their records show, by rank."""
    return {report.status.rank: Known(report.status, report.silent) for report in reports}


def table(found: Mapping[int, Known], size: int, me: int, program: Program | None, *, waits: bool = True) -> str:
    """Returns one line for each rank, headed by the rank that the others wait for.

    Args:
        found: what is known of the ranks.
        size: how many there are.
        me: the rank that asks.
        program: what runs, where that is known.
        waits: whether it asks because it waits itself.
    """
    rows = [("rank", "step", "doing", "for", "completed last")]
    awaited = {rank: _waits_for(entry.status, program) for rank, entry in found.items() if not entry.silent}
    for rank in range(size):
        entry = found.get(rank)
        if entry is None:
            rows.append((str(rank), "?", "DOES NOT ANSWER", "", ""))
            continue
        doing, seconds = _doing(entry.status, awaited.get(rank), waits and rank == me)
        if entry.left:
            doing, seconds = "has left: it closed its schedule", ""
        elif entry.silent:
            doing = f"DOES NOT ANSWER (its record: {doing})"
        rows.append((str(rank), str(entry.status.step), doing, seconds, _completed(entry.status)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([_blame(found, size, me, awaited), *lines])


def last_words(status: _core.RankStatus) -> str:
    """What a rank that is gone did last: `it was at 1F3, after 1F2, in its step 4`."""
    now, last = _action(status.now), _action(status.last)
    doing = f"it was at {now}" if now else "it was between steps" if status.step else "it had begun no step"
    return doing + (f", after {last}" if last else "") + (f", in its step {status.step}" if now else "")


def _action(entry: _core.ActionEntry | None) -> Action | None:
    return None if entry is None else action_of(entry.stage, entry.kind, entry.microbatch)


def _ago(time: int) -> str:
    return _seconds(time * 1e-9)


def _waits_for(status: _core.RankStatus, program: Program | None) -> tuple[int, str] | None:
    """The rank that it waits for, and what for; None where it computes, or does something else."""
    now = status.now
    action = _action(now)
    if now is None or action is None or program is None or now.ready or action.stage >= len(program.placement):
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


def _doing(status: _core.RankStatus, waits: tuple[int, str] | None, asking: bool) -> tuple[str, str]:
    now, last = status.now, status.last
    if status.busy is not None:
        return f"busy: {status.busy}", _seconds(status.busy_for)
    if now is not None:
        action = _action(now)
        if waits is not None:
            return f"{action}: waits for {waits[1]} from rank {waits[0]}", _ago(now.start)
        return f"{action}: waits" if asking else f"{action}: runs", _ago(now.start)
    if not status.step:
        return "has begun no step", ""
    if last is not None and last.step == status.step:
        return "between steps: has not called step() or eval() again", _ago(last.end)
    return "at the start of a step", ""


def _completed(status: _core.RankStatus) -> str:
    last = status.last
    return f"{_action(last)}, {_ago(last.end)} ago" if last is not None else "nothing"


def _seconds(value: float) -> str:
    return f"{value:.1f} s"


def _blame(found: Mapping[int, Known], size: int, me: int, waits: Mapping[int, tuple[int, str] | None]) -> str:
    """Follows which rank waits for which, from this rank to one that waits for none."""
    rank, seen = me, [me]
    while (waited := waits.get(rank)) is not None:
        rank = waited[0]
        if rank in seen:
            return f"Ranks {', '.join(map(str, [*seen[seen.index(rank) :], rank]))} wait for each other."
        seen.append(rank)
    if rank == me:
        return "What each rank is doing:"
    through = "".join(f", through rank {between}" for between in seen[1:-1])
    entry = found.get(rank)
    if entry is not None and entry.left:
        return f"It waits for rank {rank}{through}, which has left: it closed its schedule."
    if entry is None or entry.silent:
        return f"It waits for rank {rank}{through}, which does not answer: is it stopped, or its host gone?"
    return f"It waits for rank {rank}{through}: {_doing(entry.status, None, False)[0]}."
