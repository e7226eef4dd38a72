"""Timelines in Chrome's trace event format, which Perfetto opens, and back.

Format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pypipe.program.actions import Action, Kind
from pypipe.program.drawing.panels import MEANINGS, Drawn, Panel, frees, live_activations, panels_of, short_label
from pypipe.program.programs import Chain, Program
from pypipe.program.simulation.timeline import Event, Timeline

_FORMAT = 2
# Perfetto takes process 0 for the kernel's idle task, and does not show it. Format 1 began there.
_FIRST_PROCESS = {1: 0, _FORMAT: 1}
# Flows bind to the slice around their time, to the nanosecond: so they begin and end a little within it.
_INSIDE = 0.002


def chrome_trace(*drawn: Drawn) -> str:
    """Write timelines as one trace, for ui.perfetto.dev or chrome://tracing, and for `read_chrome_trace`.

    Each rank of each timeline is a process with one thread of complete events, one an action, and a counter of
    live activations; flow arrows lead from the action that made an output or gradient to the one on another rank
    that uses it. The unit is the microsecond; a time without a unit is written as so many microseconds.

    Args:
        drawn: timelines, panels, or programs (with unit times).

    Returns:
        JSON, one event a line.

    Raises:
        ProgramError: a program cannot be simulated.
    """
    panels = panels_of(drawn)
    events: list[dict[str, Any]] = []
    first = _FIRST_PROCESS[_FORMAT]
    for panel in panels:
        suffix = f", {panel.title}" if len(panels) > 1 else ""
        events += _named(panel, first, suffix)
        events += _slices(panel, first)
        events += _flows(panel, first, len(events))
        first += len(panel.timeline.ranks)
    about = {"format": _FORMAT, "panels": [_about(panel) for panel in panels]}
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return (
        f'{{"displayTimeUnit":"ms",\n"otherData":{json.dumps({"pypipe": about}, separators=(",", ":"))},\n'
        f'"traceEvents":[\n{lines}\n]}}\n'
    )


def read_chrome_trace(text: str) -> list[Panel]:
    """Read the timelines of a trace that `chrome_trace` has written.

    Raises:
        ValueError: the text is not such a trace; the message says what is wrong with it.
    """
    try:
        trace = json.loads(text)
        about = trace["otherData"]["pypipe"]
        version, abouts, events = about["format"], about["panels"], trace["traceEvents"]
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (KeyError, TypeError, IndexError):
        raise ValueError("it is not a trace that pypipe wrote: `otherData` does not say what it shows") from None
    if version not in _FIRST_PROCESS:
        raise ValueError(f"its format is {version!r}, and this pypipe reads {_FORMAT}: use the pypipe that wrote it")
    rows: dict[int, list[Event]] = {}
    for number, event in enumerate(events):
        try:
            if event["ph"] == "X":
                start = float(event["ts"])
                action = Action.parse(event["args"]["action"])
                rows.setdefault(event["pid"], []).append(Event(action, start, start + float(event["dur"])))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"event {number} of its traceEvents is damaged ({error!r})") from None
    panels = []
    first = _FIRST_PROCESS[version]
    for number, one in enumerate(abouts):
        try:
            panels.append(_panel(one, rows, first))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"timeline {number} in its otherData is damaged ({error!r})") from None
        first += panels[-1].timeline.program.n_ranks
    if not panels:
        raise ValueError("it holds no timeline")
    return panels


def _about(panel: Panel) -> dict[str, Any]:
    """Collect what the events do not hold."""
    program = panel.timeline.program
    return {
        "title": panel.title,
        "in_microseconds": panel.in_microseconds,
        "program": program.name,
        "n_ranks": program.n_ranks,
        "n_microbatches": program.n_microbatches,
        "placement": program.placement,
        "chains": [
            [chain.stages.start, chain.stages.stop, chain.microbatches.start, chain.microbatches.stop]
            for chain in program.chains
        ],
    }


def _panel(about: dict[str, Any], rows: dict[int, list[Event]], first: int) -> Panel:
    ranks = tuple(tuple(rows.get(first + rank, ())) for rank in range(about["n_ranks"]))
    program = Program(
        name=str(about["program"]),
        n_microbatches=about["n_microbatches"],
        placement=tuple(about["placement"]),
        ranks=tuple(tuple(event.action for event in events) for events in ranks),
        chains=tuple(Chain(range(a, b), range(c, d)) for a, b, c, d in about["chains"]),
    )
    for rank, events in enumerate(ranks):
        for event in events:
            stage, microbatch = event.action.stage, event.action.microbatch
            if stage >= program.n_stages or program.placement[stage] != rank or microbatch >= program.n_microbatches:
                raise ValueError(f"rank {rank} cannot run {event.action}")
    return Panel(Timeline(program, ranks), str(about["title"]), bool(about["in_microseconds"]))


def _named(panel: Panel, first: int, suffix: str) -> Iterator[dict[str, Any]]:
    for rank in range(len(panel.timeline.ranks)):
        pid = first + rank
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {rank}{suffix}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": {"name": "compute"}}


def _slices(panel: Panel, first: int) -> Iterator[dict[str, Any]]:
    timeline, freeing = panel.timeline, frees(panel.timeline)
    for rank, (events, counts) in enumerate(zip(timeline.ranks, live_activations(timeline), strict=True)):
        pid = first + rank
        for (action, start, end), alive in zip(events, counts, strict=True):
            yield {
                "ph": "X",
                "pid": pid,
                "tid": 0,
                "ts": start,
                "dur": end - start,
                "name": short_label(timeline.program, action),
                "cat": MEANINGS[action.kind],
                "args": {
                    "action": str(action),
                    "stage": action.stage,
                    **({} if action.kind.is_per_stage else {"microbatch": action.microbatch}),
                    "live activations": alive,
                },
            }
            if action.kind is Kind.F:
                yield _counter(pid, start, alive)
            if action.kind in freeing:
                yield _counter(pid, end, alive - 1)


def _counter(pid: int, at: float, count: int) -> dict[str, Any]:
    return {"ph": "C", "pid": pid, "ts": at, "name": "live activations", "args": {"count": count}}


def _flows(panel: Panel, first: int, number: int) -> Iterator[dict[str, Any]]:
    """Arrows for what crosses ranks; `number` is one that no earlier arrow has."""
    program = panel.timeline.program
    makers: dict[tuple[bool, int, int], tuple[int, Event]] = {}
    for rank, events in enumerate(panel.timeline.ranks):
        for event in events:
            if event.action.kind.is_compute and event.action.kind is not Kind.W:
                makers[event.action.kind is Kind.F, event.action.stage, event.action.microbatch] = rank, event
    neighbours = {
        True: [program.previous_stage(stage) for stage in range(program.n_stages)],
        False: [program.next_stage(stage) for stage in range(program.n_stages)],
    }
    for (forward, stage, microbatch), (rank, user) in makers.items():
        source = neighbours[forward][stage]
        if source is None or program.placement[source] == rank or (forward, source, microbatch) not in makers:
            continue
        source_rank, maker = makers[forward, source, microbatch]
        both = {"id": number, "tid": 0, "cat": "transfer", "name": "output" if forward else "gradient"}
        yield {"ph": "s", "pid": first + source_rank, "ts": maker.end - _inset(maker), **both}
        yield {"ph": "f", "bp": "e", "pid": first + rank, "ts": user.start + _inset(user), **both}
        number += 1


def _inset(event: Event) -> float:
    return min(_INSIDE, (event.end - event.start) / 2)
