"""Programs as CSV, in the format of torch.distributed.pipelining: a row for each rank, a cell for each action."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

from pypipe.program.actions import Action, Kind
from pypipe.program.errors import ProgramError
from pypipe.program.programs import Chain, Program

_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_LONG_NAMES = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
_LONG = re.compile(r"([0-9]+)(" + "|".join(_LONG_NAMES) + r")([0-9]+)")


def load_csv(path: str | os.PathLike[str], *, name: str | None = None) -> Program:
    """Read a program from a CSV file, as `loads_csv` does.

    Args:
        path: the file; UTF-8.
        name: what to call the program; the file's name without its suffix by default.

    Raises:
        ProgramError: a cell, or the file as a whole, is not a valid program; the message names file, row and column.
        OSError: the file cannot be read.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProgramError(f"{path} is not UTF-8 text (byte {error.start}): give a CSV file") from None
    return loads_csv(text, name=name if name is not None else Path(path).stem, source=str(path))


def loads_csv(text: str, *, name: str = "csv", source: str = "the text") -> Program:
    """Read a program from CSV: a row for each rank in order, a cell for each action, such as `2F0` or `3RECV_F1`.

    The format is torch.distributed.pipelining's, with transfers or without. A blank cell is idle time, and is left
    out. `(2F0;5B1)OVERLAP_F_B` is read as its parts, one after the other. The names FORWARD, FULL_BACKWARD,
    BACKWARD_INPUT and BACKWARD_WEIGHT stand for F, B, I and W. UNSHARD, RESHARD and REDUCE_GRAD name no microbatch, as
    in `2REDUCE_GRAD`. Rows that start with # are comments.

    A stage is placed on the rank that lists it, and M follows from the largest microbatch. Where consecutive stages
    have no microbatch in common, a new chain of stages begins (DualPipe).

    Args:
        text: the CSV.
        name: what to call the program.
        source: what to call the text in messages.

    Returns:
        The program; `lower` and `verify` check whether it is sound.

    Raises:
        ProgramError: a cell, or the text as a whole, is not a valid program; the message names row, column and cell,
            and what is allowed there.
    """
    places: dict[int, tuple[int, str]] = {}  # the rank of each stage, and where it was first listed
    microbatches: dict[int, set[int]] = {}
    lists: list[tuple[Action, ...]] = []
    for number, row in _rows(text, source):
        rank = len(lists)
        actions: list[Action] = []
        for column, cell in enumerate(row, start=1):
            where = f"{source}, row {number}, column {column}"
            try:
                read = _read_cell(cell.strip())
            except ValueError as error:
                raise ProgramError(f"{where}: {error}", rank, len(actions)) from None
            for action in read:
                first_rank, first = places.setdefault(action.stage, (rank, where))
                if first_rank != rank:
                    what = f"stage {action.stage} is on rank {first_rank} already ({first}); a stage is on one rank"
                    raise ProgramError(f"{where}: {cell.strip()!r}: {what}", rank, len(actions), action)
                seen = microbatches.setdefault(action.stage, set())
                if not action.kind.is_per_stage:
                    seen.add(action.microbatch)
            actions.extend(read)
        lists.append(tuple(actions))
    if not places:
        raise ProgramError(f"{source} lists no action: write a row for each rank, with cells such as 0F0 and 0B0")
    _require_all("stage", set(places), source)
    everything = set().union(*microbatches.values())
    _require_all("microbatch", everything, source)
    placement = tuple(places[stage][0] for stage in range(len(places)))
    chains = _find_chains([microbatches[stage] for stage in range(len(places))], len(everything))
    return Program(name, len(everything), placement, tuple(lists), chains)


def dump_csv(program: Program, path: str | os.PathLike[str]) -> None:
    """Write a program to a CSV file, as `dumps_csv` does.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_bytes(dumps_csv(program).encode())


def dumps_csv(program: Program) -> str:
    """Write a program as CSV, with transfers where it has them, as torch's schedules load it.

    torch's formats are "compute_only" for a program without transfers and "compute_comms" for one with. It runs all
    transfers of two ranks in one order, so give it `lower(program, synchronous=True)`. It knows one
    chain of stages only: only pypipe can load a bidirectional program.
    """
    table = io.StringIO(newline="")
    writer = csv.writer(table)
    for actions in program.ranks:
        # One blank cell keeps the row of a rank that does nothing.
        writer.writerow(map(str, actions) if actions else [""])
    return table.getvalue()


def _rows(text: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """Read the rows that stand for ranks, with their numbers from 1; blank lines at the end are ignored."""
    reader = csv.reader(io.StringIO(text.rstrip("\r\n"), newline=""))
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ProgramError(f"{source}, row {reader.line_num}: {error}") from None
        if not (row and row[0].lstrip().startswith("#")):
            yield reader.line_num, row


def _read_cell(cell: str) -> list[Action]:
    """Read the actions of a cell.

    Raises:
        ValueError: the cell is not an action.
    """
    if not cell:
        return []
    if overlap := _OVERLAP.fullmatch(cell):
        return [action for part in overlap[1].split(";") for action in _read_cell(part.strip())]
    if long := _LONG.fullmatch(cell):
        cell = f"{long[1]}{_LONG_NAMES[long[2]]}{long[3]}"
    try:
        return [Action.parse(cell)]
    except ValueError:
        kinds = ", ".join(kind.label for kind in Kind)
        raise ValueError(
            f"{cell!r} is not an action: write stage, kind and microbatch, such as 2F0 or 3RECV_F0 (the kinds are "
            f"{kinds}; the last three take no microbatch), (2F0;5B1)OVERLAP_F_B for two, or nothing"
        ) from None


def _require_all(what: str, numbers: set[int], source: str) -> None:
    """Require that numbers are 0, 1, 2, ... without a gap."""
    missing = next(number for number in range(len(numbers) + 1) if number not in numbers)
    if missing < len(numbers):
        raise ProgramError(f"{source} lists {what} {max(numbers)}, but not {what} {missing}: number them from 0")


def _find_chains(microbatches: list[set[int]], n_microbatches: int) -> tuple[Chain, ...]:
    """Cut the stages where two have no microbatch in common; give none where the parts would not be consecutive."""
    starts = [0]
    for stage in range(1, len(microbatches)):
        if microbatches[stage].isdisjoint(microbatches[stage - 1]):
            starts.append(stage)
    chains = []
    first = 0
    for start, stop in zip(starts, [*starts[1:], len(microbatches)], strict=True):
        share = set().union(*microbatches[start:stop])
        if share != set(range(first, first + len(share))):
            return ()
        chains.append(Chain(range(start, stop), range(first, first + len(share))))
        first += len(share)
    return tuple(chains) if first == n_microbatches else ()
