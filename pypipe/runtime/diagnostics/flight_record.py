"""What `pypipe show --record` does: merges the ranks' records of a pipeline that failed into one timeline."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from pypipe.runtime.diagnostics.recorder import SUFFIX, Deed, Record, read

__all__ = ["FlightError", "find", "timeline"]

_ROWS = 60


class FlightError(ValueError):
    """There is nothing to show; the message says why."""


def find(folder: Path) -> dict[int, Record]:
    """The records of the pipeline that ended last, by rank.

    Args:
        folder: what PYPIPE_RECORD_DIR was.

    Raises:
        FlightError: there is no record, or one cannot be read.
    """
    meetings: dict[str, list[Path]] = defaultdict(list)
    for path in folder.glob(f"*{SUFFIX}"):
        meetings[path.name.rsplit("-rank-", 1)[0]].append(path)
    if not meetings:
        raise FlightError(
            f"{folder} holds no record: run the pipeline with PYPIPE_RECORD_DIR={folder}. Records of pipelines that "
            "ended well are removed"
        )
    latest = max(meetings.values(), key=lambda paths: max(path.stat().st_mtime for path in paths))
    try:
        records = [read(path) for path in latest]
    except (OSError, ValueError) as error:
        raise FlightError(str(error)) from error
    return {record.rank: record for record in sorted(records, key=lambda record: record.rank)}


def timeline(records: Mapping[int, Record], rows: int = _ROWS) -> str:
    """The last actions of all ranks as text: one column for each rank, one row for each action that began.

    Times are milliseconds before the last thing that any rank noted. An action without an end was in progress.
    """
    deeds = _merged(records)
    culprit, why = _cause(records)
    lines = [why]
    if deeds:
        end = max(max(start, finish) for _, _, start, finish in deeds)
        shown = deeds[-rows:]
        if len(deeds) > len(shown):
            lines.append(f"The latest {len(shown)} of {len(deeds)} actions on record:")
        width = max(14, *(len(_cell(deed, start, finish)) + 2 for _, deed, start, finish in shown))
        lines.append("      ms  " + "".join(f"rank {rank}".ljust(width) for rank in records).rstrip())
        latest = {rank: index for index, (rank, *_) in enumerate(shown)}
        for index, (rank, deed, start, finish) in enumerate(shown):
            column = list(records).index(rank)
            mark = "  <== the cause" if rank == culprit and latest[rank] == index else ""
            cell = " " * (width * column) + _cell(deed, start, finish)
            lines.append(f"{(start - end) / 1e6:8.1f}  {cell}{mark}")
    busy = [f"Rank {rank} had said that it was busy: {record.busy}." for rank, record in records.items() if record.busy]
    return "\n".join([*lines, *busy])


def _merged(records: Mapping[int, Record]) -> Sequence[tuple[int, Deed, int, int]]:
    """(rank, deed, start, end) of all ranks on one clock, by start; end 0: in progress."""
    merged = [
        (rank, deed, deed.start + record.clock, deed.end + record.clock if deed.end else 0)
        for rank, record in records.items()
        for deed in record.deeds
    ]
    return sorted(merged, key=lambda entry: entry[2])


def _cell(deed: Deed, start: int, finish: int) -> str:
    if not finish:
        waiting = "" if deed.ready else " ..."
        return f"{deed.action} in progress{waiting}"
    return f"{deed.action} {(finish - start) / 1e6:.1f}"


def _cause(records: Mapping[int, Record]) -> tuple[int | None, str]:
    """The rank where it began, where that is known, and a sentence."""
    texts = [record.cause for record in records.values() if record.cause is not None]
    if not texts:
        return None, "No rank knew of a failure: all were killed at once, or still run."
    causes = []
    for text in texts:
        try:
            cause = json.loads(text)
            causes.append((int(cause["rank"]), str(cause["kind"]), cause))
        except (ValueError, KeyError, TypeError):
            return None, f"The pipeline failed: {text[:1000]}"
    # Ranks that failed at once may each know their own cause; most have heard of the first.
    rank, kind, cause = max(causes, key=lambda one: [other[:2] for other in causes].count(one[:2]))
    if kind == "lost":
        return rank, f"Rank {rank} was killed, crashed or ended early: {cause.get('how')}."
    if kind in ("timeout", "left"):
        return None, str(cause.get("message"))
    if kind == "overdue":
        return None, f"On rank {rank} {cause.get('message')}."
    if kind == "interrupt":
        return rank, f"Rank {rank} was interrupted (KeyboardInterrupt) at {cause.get('doing')}."
    text = (
        f"Rank {rank} failed at {cause.get('doing', 'its link')}: {cause.get('type', 'error')}: {cause.get('message')}"
    )
    return rank, text
