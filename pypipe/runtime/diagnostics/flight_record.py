"""What `pypipe show --record` does: merges the ranks' records of a pipeline that failed into one timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from pypipe import _core
from pypipe.runtime.diagnostics.recorder import SUFFIX, ActionRecord, Record, read

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
    pipelines: dict[str, list[Path]] = defaultdict(list)
    for path in folder.glob(f"*{SUFFIX}"):
        pipelines[path.name.rsplit("-rank-", 1)[0]].append(path)
    if not pipelines:
        raise FlightError(
            f"{folder} holds no record: run the pipeline with PYPIPE_RECORD_DIR={folder}. Records of pipelines that "
            "ended well are removed"
        )
    latest = max(pipelines.values(), key=lambda paths: max(path.stat().st_mtime for path in paths))
    try:
        records = [read(path) for path in latest]
    except (OSError, ValueError) as error:
        raise FlightError(str(error)) from error
    return {record.rank: record for record in sorted(records, key=lambda record: record.rank)}


def timeline(records: Mapping[int, Record], rows: int = _ROWS) -> str:
    """The last actions of all ranks as text: one column for each rank, one row for each action that began.

    Times are milliseconds before the last thing that any rank noted. An action without an end was in progress.
    """
    merged = _merged(records)
    culprit, why = _cause(records)
    lines = [why]
    if merged:
        end = max(max(start, finish) for _, _, start, finish in merged)
        shown = merged[-rows:]
        if len(merged) > len(shown):
            lines.append(f"The latest {len(shown)} of {len(merged)} actions on record:")
        width = max(14, *(len(_cell(done, start, finish)) + 2 for _, done, start, finish in shown))
        lines.append("      ms  " + "".join(f"rank {rank}".ljust(width) for rank in records).rstrip())
        latest = {rank: index for index, (rank, *_) in enumerate(shown)}
        for index, (rank, done, start, finish) in enumerate(shown):
            column = list(records).index(rank)
            mark = "  <== the cause" if rank == culprit and latest[rank] == index else ""
            cell = " " * (width * column) + _cell(done, start, finish)
            lines.append(f"{(start - end) / 1e6:8.1f}  {cell}{mark}")
    busy = [f"Rank {rank} had said that it was busy: {record.busy}." for rank, record in records.items() if record.busy]
    return "\n".join([*lines, *busy])


def _merged(records: Mapping[int, Record]) -> Sequence[tuple[int, ActionRecord, int, int]]:
    """(rank, action, start, end) of all ranks on one clock, by start; end 0: in progress."""
    merged = [
        (rank, done, done.start + record.clock, done.end + record.clock if done.end else 0)
        for rank, record in records.items()
        for done in record.actions
    ]
    return sorted(merged, key=lambda entry: entry[2])


def _cell(done: ActionRecord, start: int, finish: int) -> str:
    if not finish:
        waiting = "" if done.ready else " ..."
        return f"{done.action} in progress{waiting}"
    return f"{done.action} {(finish - start) / 1e6:.1f}"


def _cause(records: Mapping[int, Record]) -> tuple[int | None, str]:
    """The rank where it began, where that is known, and a sentence."""
    causes = [record.cause for record in records.values() if record.cause is not None]
    if not causes:
        return None, "No rank knew of a failure: all were killed at once, or still run."
    # Ranks that failed at once may each know their own cause; most have heard of the first.
    origins = [(cause.rank, cause.kind) for cause in causes]
    cause = max(causes, key=lambda one: origins.count((one.rank, one.kind)))
    kinds, rank = _core.CauseKind, cause.rank
    if cause.kind == kinds.LOST:
        return rank, f"Rank {rank} was killed, crashed or ended early: {cause.message}."
    if cause.kind in (kinds.TIMEOUT, kinds.LEFT):
        return None, cause.message
    if cause.kind == kinds.OVERDUE:
        return None, f"On rank {rank} {cause.message}."
    if cause.kind == kinds.INTERRUPT:
        return rank, f"Rank {rank} was interrupted (KeyboardInterrupt) at {cause.doing}."
    return rank, f"Rank {rank} failed at {cause.doing or 'its link'}: {cause.type or 'error'}: {cause.message}"
