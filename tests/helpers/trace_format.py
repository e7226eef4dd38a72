"""The Trace Event Format, as far as Perfetto needs it kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def complaints(trace: Any) -> Iterator[str]:
    """What the Trace Event Format forbids, or a viewer drops or draws askew."""
    named = set()
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    arrows: dict[str, dict[Any, dict[str, Any]]] = {"s": {}, "f": {}}
    for event in trace["traceEvents"]:
        phase, pid, tid = event["ph"], event.get("pid"), event.get("tid", 0)
        if not isinstance(event.get("name"), str) or type(pid) is not int or type(tid) is not int:
            yield f"no name, process or thread: {event}"
        if phase == "M":
            if not isinstance(event["args"].get("name", event["args"].get("sort_index")), str | int):
                yield f"metadata without a value: {event}"
            named.add((event["name"], pid, tid))
            continue
        if not (type(event.get("ts")) in (int, float) and 0 <= event["ts"] < float("inf")):
            yield f"no time: {event}"
        match phase:
            case "X":
                if not (type(event.get("dur")) in (int, float) and 0 <= event["dur"] < float("inf")):
                    yield f"no duration: {event}"
                    continue
                slices.setdefault((pid, tid), []).append((event["ts"], event["ts"] + event["dur"]))
            case "s" | "f":
                if arrows[phase].setdefault(event["id"], event) is not event:
                    yield f"two arrows of one number: {event}"
            case "C":
                if not all(type(value) in (int, float) for value in event["args"].values()):
                    yield f"a counter that counts nothing: {event}"
            case _:
                yield f"an unknown phase: {event}"
    for pid, tid in slices:
        if ("process_name", pid, 0) not in {(name, p, 0) for name, p, _ in named}:
            yield f"process {pid} has no name"
        if ("thread_name", pid, tid) not in named:
            yield f"thread {tid} of process {pid} has no name"
    for thread, spans in slices.items():
        open_ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start + 1e-6:
                open_ends.pop()
            if open_ends and end > open_ends[-1] + 1e-6:
                yield f"thread {thread}: slices overlap without nesting at {start}"
            open_ends.append(end)
    if arrows["s"].keys() != arrows["f"].keys():
        yield "an arrow without an end"
    for number, tail in arrows["s"].items():
        head = arrows["f"].get(number, tail)
        if (tail["name"], tail.get("cat")) != (head["name"], head.get("cat")) or head["ts"] < tail["ts"]:
            yield f"an arrow's ends do not belong together: {tail}, {head}"
