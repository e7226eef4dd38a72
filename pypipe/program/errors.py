"""The error that a faulty program raises, with a marked excerpt of the program's lists in its message."""

from __future__ import annotations

from collections.abc import Mapping

from pypipe.errors import PipelineError
from pypipe.program.actions import Action
from pypipe.program.programs import Program

_AROUND = 4  # actions shown on either side of a mark
_MOST_RANKS = 8  # ranks listed in a message: a deadlock of 64 ranks is told by its first few


class ProgramError(PipelineError, ValueError):
    """A program that must not run; the message says where the fault is and shows the lists around it.

    Attributes:
        rank: the rank at fault, or the lowest of them.
        position: the index in that rank's list; the list's length where an action is missing.
        action: the action at fault.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        position: int | None = None,
        action: Action | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.position = position
        self.action = action


def excerpt(program: Program, marks: Mapping[int, int]) -> str:
    """Show the lists of some ranks around one position each, with that position's action between > and <.

    Args:
        program: whose lists to show.
        marks: for each rank to show, the position to mark; the list's length marks its end.

    Returns:
        One line a rank, such as `  rank 0: ... 0F1, >0SEND_F1<, 0B0 ...`, without a last newline.
    """
    lines = []
    for rank, mark in sorted(marks.items()):
        actions = program.ranks[rank]
        first, last = max(0, mark - _AROUND), min(len(actions), mark + _AROUND + 1)
        cells = [f">{actions[at]}<" if at == mark else str(actions[at]) for at in range(first, last)]
        if mark >= len(actions):
            cells.append(">end<")
        before, after = "... " if first else "", " ..." if last < len(actions) else ""
        lines.append(f"  rank {rank}: {before}{', '.join(cells)}{after}")
    return "\n".join(lines)


def fault(program: Program, what: str, action: Action, marks: Mapping[int, int]) -> ProgramError:
    """Make an error about one action.

    Args:
        program: the faulty program.
        what: the fault and its remedy; the message adds rank, position and action before it.
        action: the action at fault.
        marks: as for `excerpt`; its first rank is the one at fault.
    """
    rank, position = next(iter(marks.items()))
    return ProgramError(
        f"{program.name}: rank {rank}, position {position}, {action}: {what}\n{excerpt(program, marks)}",
        rank,
        position,
        action,
    )


def stuck(program: Program, waits: Mapping[int, tuple[int, str]]) -> ProgramError:
    """Make an error about ranks that wait for each other forever.

    Args:
        program: the faulty program.
        waits: for each blocked rank, the position that it cannot pass, and what it waits for.
    """
    shown = sorted(waits)[:_MOST_RANKS]
    rank, (position, _) = shown[0], waits[shown[0]]
    action = program.ranks[rank][position]
    reasons = [f"  rank {r} at position {waits[r][0]} {waits[r][1]}" for r in shown]
    if len(waits) > len(shown):
        reasons.append(f"  and {len(waits) - len(shown)} more ranks")
    lists = excerpt(program, {r: waits[r][0] for r in shown})
    return ProgramError(
        f"{program.name}: deadlock: rank {rank}, position {position}, {action} never gets to run\n"
        + "\n".join(reasons)
        + f"\n{lists}",
        rank,
        position,
        action,
    )
