"""torch's tables of actions, rank by rank, to pypipe's programs and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from pypipe.errors import ConfigurationError
from pypipe.program import Program, ProgramError, dump_csv, load_csv, loads_csv

__all__ = ["FORMATS", "program_of", "read", "stage_to_rank", "table_of", "write"]

FORMATS = ("compute_only", "compute_comms")


def read(path: str | os.PathLike[str], format: str) -> Program:
    """The program of a CSV file.

    Raises:
        ConfigurationError: another format than torch's two; transfers in a file that is called compute_only.
        ProgramError: a cell, or the file as a whole, is not a program.
        OSError: the file cannot be read.
    """
    _require_format(format)
    program = load_csv(path, name="_load_csv")  # not the file's name: ranks compare it
    return _checked(program, format, str(path))


def program_of(actions: Mapping[int, Sequence[Any]], format: str) -> Program:
    """The program of a table as torch's schedules make it: for each rank, actions and None, which is idle time."""
    _require_format(format)
    lines = [
        ",".join("" if action is None else str(action) for action in actions[rank]) or '""' for rank in sorted(actions)
    ]
    return _checked(loads_csv("\n".join(lines), name="actions", source="the actions"), format, "the actions")


def table_of(program: Program) -> dict[int, list[Any]]:
    """The program as torch's table; an action that torch's has no name for remains pypipe's."""
    return {rank: [_torchs(action) for action in actions] for rank, actions in enumerate(program.ranks)}


def stage_to_rank(program: Program) -> dict[int, int]:
    """On which rank each stage is."""
    return dict(enumerate(program.placement))


def write(program: Program, path: str | os.PathLike[str]) -> None:
    """Writes the program as torch's `_dump_csv` does."""
    dump_csv(program, path)


def _torchs(action: Any) -> Any:
    try:
        return torch_schedules._Action.from_str(str(action))
    except (RuntimeError, ValueError):
        return action


def _require_format(format: str) -> None:
    if format not in FORMATS:
        raise ConfigurationError(f"format={format!r}: torch's CSV files are {' or '.join(map(repr, FORMATS))}")


def _checked(program: Program, format: str, source: str) -> Program:
    if format == "compute_only" and program != program.compute_only():
        raise ConfigurationError(
            f"{source} holds transfers or actions of whole stages, but format is 'compute_only': give "
            "format='compute_comms'"
        )
    if len(program.chains) > 1:
        raise ProgramError(
            f"{source}: torch's schedules know one chain of stages: build pypipe.ScheduleDualPipe instead"
        )
    return program
