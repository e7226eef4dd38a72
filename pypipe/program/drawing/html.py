"""Timelines as one HTML page that needs nothing else: zoom, pan, and the figures of each action."""

from __future__ import annotations

import json
import re
from html import escape
from importlib import resources
from typing import Any

from pypipe.program.actions import Kind
from pypipe.program.drawing.palette import COLOURS
from pypipe.program.drawing.panels import (
    MEANINGS,
    Drawn,
    Panel,
    caption,
    chunks,
    frees,
    idle_shares,
    is_linear,
    kinds_of,
    live_activations,
    panels_of,
    peaks,
    row_name,
    share_text,
    time_text,
)

_MARKER = re.compile(r"@@(\w+)@@")


def html(*drawn: Drawn) -> str:
    """Draw timelines as one self-contained HTML page, on one scale of time.

    The page zooms and pans by wheel, pointer and keys, and shows action, start, end and live activations of
    what the pointer or the keys choose. It loads nothing: its content security policy forbids it.

    Args:
        drawn: timelines, panels, or programs (with unit times).

    Raises:
        ProgramError: a program cannot be simulated.
    """
    panels = panels_of(drawn)
    data = {
        "kinds": [
            {
                "label": kind.letter,
                "meaning": meaning,
                "perStage": kind.is_per_stage,
                "fill": COLOURS[kind].fill,
                "text": COLOURS[kind].text,
            }
            for kind, meaning in MEANINGS.items()
        ],
        "panels": [_data(panel) for panel in panels],
    }
    parts = {
        "title": escape("; ".join(panel.title for panel in panels)),
        "legend": " ".join(map(_key, kinds_of(panels))),
        "panels": "\n".join(map(_section, panels)),
        # Only `<` could end the script element, or begin a comment in it.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    return _MARKER.sub(lambda marker: parts[marker[1]], template)


def _data(panel: Panel) -> dict[str, Any]:
    timeline = panel.timeline
    numbers = {kind: number for number, kind in enumerate(MEANINGS)}
    columns = zip(timeline.ranks, live_activations(timeline), timeline.peak_activations, strict=True)
    return {
        "title": panel.title,
        "microseconds": panel.in_microseconds,
        "step": _short(timeline.step_time),
        "linear": is_linear(timeline.program),
        "chunks": chunks(timeline.program),
        "frees": [numbers[kind] for kind in MEANINGS if kind in frees(timeline)],
        "rows": [
            {
                "name": row_name(timeline.program, rank),
                "peak": peak,
                "events": [
                    [_short(start), _short(end), numbers[action.kind], action.stage, action.microbatch, alive]
                    for (action, start, end), alive in zip(events, live, strict=True)
                ],
            }
            for rank, (events, live, peak) in enumerate(columns)
        ],
    }


def _section(panel: Panel) -> str:
    timeline = panel.timeline
    rows = []
    for rank, (idle, peak) in enumerate(zip(idle_shares(timeline), peaks(timeline), strict=True)):
        busy = timeline.step_time * (1 - idle)
        cells = (time_text(busy, panel.in_microseconds), share_text(idle), peak)
        rows.append(
            f'<tr><th scope="row">{row_name(timeline.program, rank)}</th>'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "busy", "idle", "peak activations"))
    name = escape(f"{panel.title}: timeline of the ranks; the arrow keys go from action to action", quote=True)
    return (
        f"<section>\n<h2>{escape(panel.title)}</h2>\n<p>{escape(caption(panel, title=False))}</p>\n"
        f'<canvas tabindex="0" role="application" aria-label="{name}"></canvas>\n'
        f"<details>\n<summary>Ranks as a table</summary>\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody>\n</table>\n</details>\n</section>"
    )


def _key(kind: Kind) -> str:
    colour = COLOURS[kind]
    return f'<span><i style="background:{colour.fill};color:{colour.text}">{kind.letter}</i>{MEANINGS[kind]}</span>'


def _short(time: float) -> float:
    """Return the same number, as an integer where it is one, which is shorter in JSON."""
    return int(time) if time == int(time) else time
