"""Drawing: a program's timeline as a grid of characters."""

from __future__ import annotations

from .programs import Program
from .simulation import Timeline, simulate

_IDLE = "·"
_LABEL_WIDTH = 10


def grid(drawn: Timeline | Program) -> str:
    """The character picture of a timeline: a row for each rank, a column for each unit of time.

    A cell shows kind and microbatch, such as `F0`, and the stage before them, such as `2F0`, where ranks and
    stages are not one to one; a dot is idle time. An action longer than a unit fills several columns.

    Args:
        drawn: a timeline whose starts and ends are whole numbers; or a program, drawn with unit times.

    Raises:
        ProgramError: the program cannot be simulated.
        ValueError: a start or an end is not a whole number.
    """
    if isinstance(drawn, Program):
        drawn = simulate(drawn, forward=1.0, backward=1.0, input_backward=1.0, weight_backward=1.0)
    is_linear = drawn.program.placement == tuple(range(drawn.program.n_ranks))
    n_columns = round(drawn.step_time)
    rows = []
    for rank, events in enumerate(drawn.ranks):
        cells = [_IDLE] * n_columns
        for action, start, end in events:
            if start != round(start) or end != round(end):
                raise ValueError(f"{action} runs from {start} to {end}: a grid shows whole times only")
            text = f"{action.kind.label}{action.microbatch}" if is_linear else str(action)
            cells[round(start) : round(end)] = [text] * round(end - start)
        rows.append((f"{'Stage' if is_linear else 'Rank'} {rank}:", cells))
    header = [str(column) for column in range(n_columns)]
    width = max((len(cell) for cells in (header, *(cells for _, cells in rows)) for cell in cells), default=0) + 2
    return "\n".join(
        (label.ljust(_LABEL_WIDTH) + "".join(cell.ljust(width) for cell in cells)).rstrip()
        for label, cells in (("t:", header), *rows)
    )
