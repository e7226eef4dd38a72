"""Timelines drawn with characters: one rank a row, time from left to right."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from pypipe.program.actions import Kind
from pypipe.program.drawing.palette import COLOURS
from pypipe.program.drawing.panels import (
    MEANINGS,
    Drawn,
    Panel,
    caption,
    chunks,
    end_of,
    is_linear,
    kinds_of,
    letter_and_microbatch,
    number_text,
    panels_of,
    peaks,
    row_name,
    short_label,
    ticks,
    time_unit,
)
from pypipe.program.programs import Program
from pypipe.program.simulation.timeline import Event, Timeline

_IDLE = "·"
_GOES_ON = "─"
_SEVERAL = "▒"
_LABEL_WIDTH = 10
_NARROWEST = 40


def grid(drawn: Timeline | Program) -> str:
    """Draw a timeline with characters: a row for each rank, a column for each unit of time.

    A cell shows kind and microbatch, such as `F0`, and the stage before them, such as `2F0`, where ranks and
    stages are not one to one; a dot is idle time. An action longer than a unit fills several columns.

    Args:
        drawn: a timeline whose starts and ends are whole numbers; or a program, drawn with unit times.

    Raises:
        ProgramError: the program cannot be simulated.
        ValueError: a start or an end is not a whole number.
    """
    (panel,) = panels_of([drawn])
    for events in panel.timeline.ranks:
        for action, start, end in events:
            if start != round(start) or end != round(end):
                raise ValueError(f"{action} runs from {start} to {end}: a grid shows whole times only")
    return "\n".join(_Grid([panel], gap=2, colour=False).lines(panel))


def terminal(*drawn: Drawn, width: int = 80, colour: bool = False) -> str:
    """Draw timelines for a terminal, each below its caption, with the figures that they show.

    Where times are whole and the picture of `grid` fits, it is drawn; else columns stand for equal shares of the
    whole time: an action begins with as much of its name as fits, a line goes on to its end, and `▒` is a column
    with several short actions of different kinds.

    Args:
        drawn: timelines, panels, or programs (with unit times), on one scale of time.
        width: the most columns that a line takes, but at least 40.
        colour: whether to colour the kinds of action, with ANSI escape sequences for 256 colours.

    Raises:
        ProgramError: a program cannot be simulated.
    """
    panels = panels_of(drawn)
    width = max(width, _NARROWEST)
    picture = _picture(panels, width, colour)
    blocks = []
    for panel in panels:
        figures = f"peak activations by rank: {' '.join(peaks(panel.timeline))}"
        lines = [*_wrapped(caption(panel), width), *picture.lines(panel), *_wrapped(figures, width)]
        blocks.append("\n".join(lines))
    if colour:
        keys = (_painted(f" {kind.letter} ", kind, 0) + f" {MEANINGS[kind]}" for kind in kinds_of(panels))
        blocks.append("  ".join(keys))
    return "\n\n".join(blocks)


def _picture(panels: Sequence[Panel], width: int, colour: bool) -> _Grid | _Scaled:
    if _is_whole(panels):
        for gap in (2, 1):
            picture = _Grid(panels, gap, colour)
            if picture.width <= width:
                return picture
    return _Scaled(panels, width, colour)


def _is_whole(panels: Sequence[Panel]) -> bool:
    every = (event for panel in panels for events in panel.timeline.ranks for event in events)
    return all(start == round(start) and end == round(end) for _, start, end in every)


class _Grid:
    """A cell for each unit of time; a long action is named in each of its cells."""

    def __init__(self, panels: Sequence[Panel], gap: int, colour: bool) -> None:
        self._n_cells = round(end_of(panels))
        self._colour = colour
        labels = (
            short_label(panel.timeline.program, event.action)
            for panel in panels
            for events in panel.timeline.ranks
            for event in events
        )
        last = str(max(self._n_cells - 1, 0))
        self._gap = gap
        self._cell = max((len(label) for label in (last, *labels)), default=0) + gap
        self._margin = _margin(panels)
        self.width = self._margin + self._n_cells * self._cell - gap

    def lines(self, panel: Panel) -> Iterator[str]:
        cells = (str(number).ljust(self._cell) for number in range(self._n_cells))
        yield ("t:".ljust(self._margin) + "".join(cells)).rstrip()
        shades = _shades(panel.timeline.program)
        for rank, events in enumerate(panel.timeline.ranks):
            line = f"{row_name(panel.timeline.program, rank)}:".ljust(self._margin)
            at = 0
            for event in events:
                line += self._idle(round(event.start) - at)
                line += self._event(panel.timeline.program, event, shades)
                at = round(event.end)
            yield (line + self._idle(self._n_cells - at)).rstrip()

    def _idle(self, n_cells: int) -> str:
        return _IDLE.ljust(self._cell) * n_cells

    def _event(self, program: Program, event: Event, shades: Sequence[int] | None) -> str:
        text = short_label(program, event.action).ljust(self._cell) * round(event.end - event.start)
        if not self._colour:
            return text
        kind, shade = event.action.kind, _shade(event, shades)
        return _painted(text[: -self._gap], kind, shade) + text[-self._gap :] if text else text


class _Scaled:
    """Columns for equal shares of the whole time."""

    def __init__(self, panels: Sequence[Panel], width: int, colour: bool) -> None:
        self._colour = colour
        self._margin = _margin(panels)
        end = end_of(panels)
        room = width - self._margin
        # Where times are whole, so are the widths of actions if they can be.
        per_unit = room // end if end and _is_whole(panels) else 0
        self._per_time = float(per_unit or (room / end if end else 0.0))
        self._n_columns = round(end * self._per_time)

    def lines(self, panel: Panel) -> Iterator[str]:
        yield self._axis(panel).rstrip()
        program, shades = panel.timeline.program, _shades(panel.timeline.program)
        full = self._has_room_for_stages(panel)
        for rank, events in enumerate(panel.timeline.ranks):
            line = f"{row_name(program, rank)}:".ljust(self._margin)
            for shown, columns in groupby(self._columns(events)):
                size = sum(1 for _ in columns)
                if not isinstance(shown, Event):
                    line += shown * size
                    continue
                text = _fitted(program, shown, size, full)
                line += _painted(text, shown.action.kind, _shade(shown, shades)) if self._colour else text
            yield line

    def _has_room_for_stages(self, panel: Panel) -> bool:
        """Tell whether every action's full name fits with a sign after it, so that no two names touch."""
        return all(
            len(short_label(panel.timeline.program, action)) < int((end - start) * self._per_time)
            for events in panel.timeline.ranks
            for action, start, end in events
        )

    def _axis(self, panel: Panel) -> str:
        line = "t:".ljust(self._margin)
        end = end_of([panel])
        size, unit = time_unit(end, panel.in_microseconds)
        for tick in ticks(end / size, max(round(end * self._per_time) // 10, 2)):
            column = self._margin + round(tick * size * self._per_time)
            text = f"{number_text(tick)} {unit}".rstrip()
            if column + len(text) <= self._margin + self._n_columns and column >= len(line):
                line = line.ljust(column) + text + " "
        return line

    def _columns(self, events: Sequence[Event]) -> Iterator[Event | str]:
        """Find, for each column, what fills most of it; or a sign for idle time or several short actions."""
        first = 0
        for column in range(self._n_columns):
            left, right = column / self._per_time, (column + 1) / self._per_time
            while first < len(events) and events[first].end <= left:
                first += 1
            last = first
            while last < len(events) and events[last].start < right:
                last += 1
            inside = events[first:last]
            parts = [min(event.end, right) - max(event.start, left) for event in inside]
            idle = right - left - sum(parts)
            most = max(parts, default=0.0)
            event = inside[parts.index(most)] if parts else None
            if event is None or idle > most:
                yield _IDLE
            elif len(inside) > 1 and event.end - event.start < right - left:
                kinds = {each.action.kind for each in inside}
                yield event.action.kind.letter if len(kinds) == 1 else _SEVERAL
            else:
                yield event


def _fitted(program: Program, event: Event, size: int, full: bool) -> str:
    """Shorten an event's name to `size` columns without cutting a number, which would then be a wrong one."""
    action = event.action
    names = [letter_and_microbatch(action), action.kind.letter]
    if full:
        names.insert(0, short_label(program, action))
    return next(name for name in names if len(name) <= size or name == names[-1]).ljust(size, _GOES_ON)


def _margin(panels: Sequence[Panel]) -> int:
    names = (row_name(panel.timeline.program, panel.timeline.program.n_ranks - 1) for panel in panels)
    return max(_LABEL_WIDTH, *(len(name) + 3 for name in names))


def _shades(program: Program) -> list[int] | None:
    """Choose the shade of each stage's actions; None where it alternates between microbatches."""
    return None if is_linear(program) else chunks(program)


def _shade(event: Event, shades: Sequence[int] | None) -> int:
    return event.action.microbatch if shades is None else shades[event.action.stage]


def _painted(text: str, kind: Kind, shade: int) -> str:
    colour = COLOURS[kind]
    return f"\x1b[38;5;{colour.terminal_text};48;5;{colour.terminal[shade % 2]}m{text}\x1b[0m"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
