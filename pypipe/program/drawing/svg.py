"""Timelines as SVG for papers: vectors and text only; the same input always gives the same bytes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

from pypipe.program.actions import Kind
from pypipe.program.drawing.palette import COLOURS
from pypipe.program.drawing.panels import (
    MEANINGS,
    Drawn,
    Panel,
    caption,
    chunks,
    end_of,
    idle_shares,
    kinds_of,
    letter_and_microbatch,
    number_text,
    panels_of,
    peaks,
    row_name,
    share_text,
    short_label,
    ticks,
    time_unit,
)
from pypipe.program.simulation.timeline import Event

# Lengths are CSS pixels, of which 96 make an inch.
_ROW, _ROW_GAP = 20, 4
_PADDING = 10
_TITLE, _LINE, _AXIS, _LEGEND = 16, 14, 36, 24
_FONT, _SMALL, _SMALLEST = 12, 10, 7
_CHARACTER = 0.58  # of the font size: a digit's width, rounded up
_IDLE_COLUMN, _PEAK_COLUMN = 56, 40
_BAR = 1.5
_NARROWEST = 300
_GREY = "#444444"


def svg(*drawn: Drawn, width: int = 760) -> str:
    """Draw timelines as one SVG document, each below its caption, on one scale of time.

    A box is an action: its colour says the kind, its text the microbatch, with kind and stage where there is
    room. Bars at the foot of a box count the stages of its rank that come before its own. Colours differ in lightness
    as well, so that they survive grey print.

    Args:
        drawn: timelines, panels, or programs (with unit times).
        width: of the picture in CSS pixels, at least 300; its height follows from the number of ranks.

    Raises:
        ProgramError: a program cannot be simulated.
    """
    panels = panels_of(drawn)
    width = max(width, _NARROWEST)
    names = [row_name(panel.timeline.program, panel.timeline.program.n_ranks - 1) for panel in panels]
    left = _PADDING + max(map(len, names)) * _FONT * _CHARACTER + 6
    right = width - _PADDING - _IDLE_COLUMN - _PEAK_COLUMN
    end = end_of(panels)
    scale = (right - left) / end if end else 0.0
    body: list[str] = []
    top = float(_PADDING)
    for panel in panels:
        part = _Part(panel, left, right, scale)
        body += [f'<g transform="translate(0 {_n(top)})">', *part.lines(width), "</g>"]
        top += part.height
    body += _legend(panels, left, top)
    height = top + _LEGEND
    title = "; ".join(caption(panel) for panel in panels)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_n(height)}" '
            f'viewBox="0 0 {width} {_n(height)}" role="img" aria-label={quoteattr(title)} '
            f'font-family="Helvetica, Arial, Liberation Sans, sans-serif" font-size="{_FONT}">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{_n(height)}" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


class _Part:
    """One panel of the picture, placed at the top of its own coordinates."""

    def __init__(self, panel: Panel, left: float, right: float, scale: float) -> None:
        self._panel = panel
        self._left, self._right, self._scale = left, right, scale
        self._notes = textwrap.wrap(caption(panel, title=False), int((right - left) / (_SMALL * _CHARACTER)))
        self._first_row = _TITLE + _LINE * len(self._notes) + 4
        self._axis = self._first_row + len(panel.timeline.ranks) * (_ROW + _ROW_GAP)
        self.height = self._axis + _AXIS

    def lines(self, width: int) -> Iterator[str]:
        panel, timeline = self._panel, self._panel.timeline
        program, numbers = timeline.program, chunks(timeline.program)
        yield _text(self._left, _FONT, panel.title, weight="bold")
        for number, note in enumerate(self._notes, start=1):
            yield _text(self._left, _FONT - 1 + number * _LINE, note, size=_SMALL, fill=_GREY)
        for x, name in ((self._right + _IDLE_COLUMN, "idle"), (width - _PADDING, "peak")):
            yield _text(x, self._first_row - 5, name, size=_SMALL, fill=_GREY, anchor="end")
        labels = _Labels(panel, self._scale)
        columns = zip(timeline.ranks, idle_shares(timeline), peaks(timeline), strict=True)
        for rank, (events, idle, peak) in enumerate(columns):
            y = self._first_row + rank * (_ROW + _ROW_GAP)
            base = y + _ROW / 2 + _FONT * 0.36
            yield _text(self._left - 6, base, row_name(program, rank), anchor="end")
            yield (
                f'<rect x="{_n(self._left)}" y="{_n(y)}" width="{_n(timeline.step_time * self._scale)}" '
                f'height="{_ROW}" fill="#ffffff" stroke="#999999" stroke-width="0.5"/>'
            )
            yield from self._boxes(events, numbers, y, labels)
            yield _text(self._right + _IDLE_COLUMN, base, share_text(idle), anchor="end")
            yield _text(width - _PADDING, base, peak, anchor="end")
        yield from self._time_axis()

    def _boxes(self, events: Sequence[Event], numbers: Sequence[int], y: float, labels: _Labels) -> Iterator[str]:
        for kind, colour in COLOURS.items():
            boxes: list[str] = []
            bars: list[str] = []
            texts: list[str] = []
            for event in events:
                if event.action.kind is not kind:
                    continue
                x, width = self._left + event.start * self._scale, (event.end - event.start) * self._scale
                edge = ' stroke="#ffffff" stroke-width="0.6"' if width > 3 else ""
                boxes.append(f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_ROW}"{edge}/>')
                bars += _bars(x, y + _ROW, width, numbers[event.action.stage])
                if label := labels.text(event):
                    texts.append(_text(x + width / 2, y + _ROW / 2 + labels.size * 0.34 - 0.5, label))
            if boxes:
                yield f'<g fill="{colour.fill}">{"".join(boxes)}</g>'
            if bars:
                yield f'<path fill="{colour.text}" d="{"".join(bars)}"/>'
            if texts:
                yield f'<g fill="{colour.text}" font-size="{_n(labels.size)}" text-anchor="middle">{"".join(texts)}</g>'

    def _time_axis(self) -> Iterator[str]:
        length = self._panel.timeline.step_time * self._scale
        size, unit = time_unit(self._panel.timeline.step_time, self._panel.in_microseconds)
        marks = ticks(self._panel.timeline.step_time / size, max(int(length / 50), 2))
        path = "".join(f"M{_n(self._left + tick * size * self._scale)} {_n(self._axis)}v4" for tick in marks)
        yield f'<path d="M{_n(self._left)} {_n(self._axis)}h{_n(length)}{path}" stroke="{_GREY}" stroke-width="0.75"/>'
        for tick in marks:
            x, text = self._left + tick * size * self._scale, number_text(tick)
            yield _text(x, self._axis + 15, text, size=_SMALL, fill=_GREY, anchor="middle")
        if unit:
            yield _text(self._left + length + 8, self._axis + 15, unit, size=_SMALL, fill=_GREY)


class _Labels:
    """What is written on a panel's boxes: one form and size of text for all, so that rows read evenly.

    It is the longest form that fits on every box; or else the microbatch alone, smaller if need be, on the boxes
    that have room for it.
    """

    def __init__(self, panel: Panel, scale: float) -> None:
        self._program, self._scale = panel.timeline.program, scale
        events = [event for events in panel.timeline.ranks for event in events if event.end > event.start]
        self.size = float(_SMALL)
        self._form = 0
        while self._form < 2 and any(self._fitting(event) < _SMALL for event in events):
            self._form += 1
        if self._form == 2 and events:
            # A tenth of the boxes may be too narrow: a few short actions do not make all numbers small.
            sizes = sorted(map(self._fitting, events))
            self.size = min(max(sizes[len(sizes) // 10], _SMALLEST), _SMALL)

    def text(self, event: Event) -> str:
        return self._name(event) if self._fitting(event) >= self.size else ""

    def _fitting(self, event: Event) -> float:
        """Compute the size at which an event's label is as wide as its box."""
        return ((event.end - event.start) * self._scale - 2) / (len(self._name(event)) * _CHARACTER)

    def _name(self, event: Event) -> str:
        action = event.action
        least = action.kind.letter if action.kind.is_per_stage else str(action.microbatch)
        forms = (short_label(self._program, action), letter_and_microbatch(action), least)
        return forms[self._form]


def _bars(x: float, foot: float, width: float, count: int) -> Iterator[str]:
    """Lines along the foot of a box."""
    inset = min(2.0, width / 4)
    for bar in range(count):
        y = foot - 1 - bar * (_BAR + 1) - _BAR
        yield f"M{_n(x + inset)} {_n(y)}h{_n(width - 2 * inset)}v{_n(_BAR)}h{_n(2 * inset - width)}z"


def _legend(panels: Sequence[Panel], left: float, top: float) -> Iterator[str]:
    x = left
    for kind in kinds_of(panels):
        colour, text = COLOURS[kind], MEANINGS[kind]
        yield f'<rect x="{_n(x)}" y="{_n(top)}" width="20" height="14" fill="{colour.fill}"/>'
        yield _text(x + 10, top + 10.5, kind.letter, size=_SMALL, fill=colour.text, anchor="middle")
        yield _text(x + 26, top + 11, text, size=_SMALL)
        x += 26 + len(text) * _SMALL * _CHARACTER + 14
    most = max(number for panel in panels for number in chunks(panel.timeline.program))
    if most:
        bars = "".join(_bars(x, top + 14, 20, most))
        yield f'<rect x="{_n(x)}" y="{_n(top)}" width="20" height="14" fill="{COLOURS[Kind.F].fill}"/>'
        yield f'<path d="{bars}"/>'
        yield _text(x + 26, top + 11, "a bar for each earlier stage of the rank", size=_SMALL)


def _text(x: float, y: float, text: str, *, size: int = 0, fill: str = "", weight: str = "", anchor: str = "") -> str:
    attributes = {
        "font-size": str(size) if size else "",
        "font-weight": weight,
        "fill": fill,
        "text-anchor": anchor,
    }
    written = "".join(f' {name}="{value}"' for name, value in attributes.items() if value)
    return f'<text x="{_n(x)}" y="{_n(y)}"{written}>{escape(text)}</text>'


def _n(value: float) -> str:
    """Format a length, to a hundredth of a pixel."""
    return number_text(round(value, 2), 8)
