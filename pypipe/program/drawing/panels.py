"""Names, numbers and scales that all pictures of timelines share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pypipe.program.actions import Action, Kind
from pypipe.program.programs import Program
from pypipe.program.simulation.bubble import split_bubble
from pypipe.program.simulation.timeline import Event, Timeline, simulate

MEANINGS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.UNSHARD: "gather parameters",
    Kind.RESHARD: "free parameters",
    Kind.REDUCE_GRAD: "reduce gradients",
}
"""The kinds of action that are drawn, in the order of a legend."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline with its caption. Pictures of several panels show them one below the other, on one scale.

    Args:
        timeline: what is drawn, simulated or measured.
        title: its caption, such as "1f1b, measured"; by default the program's name.
        in_microseconds: whether its times are microseconds; else they are numbers without a unit.
    """

    timeline: Timeline
    title: str = ""
    in_microseconds: bool = False


Drawn = Panel | Timeline | Program


def panels_of(drawn: Sequence[Drawn]) -> list[Panel]:
    """Make panels of anything that can be drawn.

    A program is drawn with unit times: a B takes two where other backwards are split, and a RESHARD takes none.

    Raises:
        ProgramError: a program cannot be simulated.
        ValueError: there is nothing to draw.
    """
    if not drawn:
        raise ValueError("there is nothing to draw: give a timeline or a program")
    panels = []
    for one in drawn:
        if isinstance(one, Program):
            backward = 2.0 if splits_backward(one) else 1.0
            one = simulate(
                one,
                forward=1.0,
                backward=backward,
                input_backward=1.0,
                weight_backward=1.0,
                unshard=1.0,
                reduce_grad=1.0,
            )
        panels.append(one if isinstance(one, Panel) else Panel(one))
    return [panel if panel.title else Panel(panel.timeline, *_default(panel)) for panel in panels]


def _default(panel: Panel) -> tuple[str, bool]:
    return panel.timeline.program.name, panel.in_microseconds


def splits_backward(program: Program) -> bool:
    """Tell whether any backward is split into two halves."""
    return any(action.kind is Kind.W for actions in program.ranks for action in actions)


def is_linear(program: Program) -> bool:
    """Tell whether ranks and stages are one to one, so that a rank's row can be named after its stage."""
    return program.placement == tuple(range(program.n_ranks))


def row_name(program: Program, rank: int) -> str:
    """Name a rank's row."""
    return f"{'Stage' if is_linear(program) else 'Rank'} {rank}"


def short_label(program: Program, action: Action) -> str:
    """Name an action within its rank's row: the stage is left out where the row has one stage only."""
    stage = "" if is_linear(program) else str(action.stage)
    return f"{stage}{letter_and_microbatch(action)}"


def letter_and_microbatch(action: Action) -> str:
    """Name an action without its stage: `F0`; `R`, which has no microbatch, for a REDUCE_GRAD."""
    return action.kind.letter if action.kind.is_per_stage else f"{action.kind.letter}{action.microbatch}"


def peaks(timeline: Timeline) -> list[str]:
    """Say for each rank how many microbatches it keeps at most, counting what one takes on all of its stages as 1."""
    program = timeline.program
    per_rank = len(program.chains[0].stages) / program.n_ranks
    return [f"{peak / per_rank:g}" for peak in timeline.peak_activations]


def chunks(program: Program) -> list[int]:
    """Number each stage among the stages of its rank, from 0."""
    seen = [0] * program.n_ranks
    numbers = []
    for rank in program.placement:
        numbers.append(seen[rank])
        seen[rank] += 1
    return numbers


def live_activations(timeline: Timeline) -> list[list[int]]:
    """Count, for each rank and event, the activations that are alive while it runs, its own included.

    One activation is that of one stage and microbatch: alive from the start of its F to the end of its B, or
    of its W, which is what `Verified.peak_activations` counts. Where nothing runs backward, F frees its own.
    """
    freeing = frees(timeline)
    counts = []
    for events in timeline.ranks:
        alive = 0
        row = []
        for action, _, _ in events:
            alive += action.kind is Kind.F
            row.append(alive)
            alive -= action.kind in freeing
        counts.append(row)
    return counts


def kinds_of(panels: Sequence[Panel]) -> list[Kind]:
    """List the kinds of action that these timelines hold, in the order of a legend."""
    found = {event.action.kind for panel in panels for events in panel.timeline.ranks for event in events}
    return [kind for kind in MEANINGS if kind in found]


def frees(timeline: Timeline) -> frozenset[Kind]:
    """List the kinds of action after which an activation is no longer needed."""
    ending = frozenset((Kind.B, Kind.W))
    backward = any(event.action.kind in ending for events in timeline.ranks for event in events)
    return ending if backward else frozenset((Kind.F,))


def ticks(length: float, most: int) -> list[float]:
    """Divide a time axis by round numbers from 0: at most `most` of them, at 1, 2 or 5 times a power of ten.

    Args:
        length: where the axis ends.
        most: at least 2.
    """
    if not length > 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(length / most))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if length // (factor * power) + 1 <= most)
    return [round(number * step, 12) for number in range(int(length // step) + 1)]


def time_unit(longest: float, in_microseconds: bool) -> tuple[float, str]:
    """Choose the unit that suits times up to `longest`, and its microseconds; `(1, "")` for plain numbers."""
    if not in_microseconds:
        return 1.0, ""
    units = ((1e6, "s"), (1e3, "ms"))
    return next((unit for unit in units if abs(longest) >= unit[0]), (1.0, "µs"))


def time_text(value: float, in_microseconds: bool, digits: int = 4) -> str:
    """Format a time: `12.5`, or with a unit `12.5 µs`, `3.2 ms`, `1.05 s`."""
    size, unit = time_unit(value, in_microseconds)
    return f"{number_text(value / size, max(digits, len(str(int(abs(value / size))))))} {unit}".rstrip()


def number_text(value: float, digits: int = 6) -> str:
    """Format a number with at most this many significant digits, and no trailing zeros."""
    text = f"{value:.{digits}g}"
    if "e" in text:
        text = f"{value:.0f}" if abs(value) >= 1 else f"{value:.12f}".rstrip("0")
    return "0" if text in ("-0", "0.") else text


def share_text(share: float) -> str:
    """Format a share as percent, with one digit after the point; `0` for zero."""
    text = f"{share:.1%}"
    return "0%" if text in ("0.0%", "-0.0%") else text


def caption(panel: Panel, *, title: bool = True) -> str:
    """Say in one line what is drawn, with its figures."""
    timeline = panel.timeline
    step = time_text(timeline.step_time, panel.in_microseconds)
    figures = (
        f"P={timeline.program.n_ranks}, M={timeline.program.n_microbatches}, {mean_times(panel)}: "
        f"step {step}, bubble {share_text(timeline.bubble_ratio)}{_causes(timeline)}"
    )
    return f"{panel.title}, {figures}" if title else figures


def _causes(timeline: Timeline) -> str:
    """Say what the bubble consists of, where it has several causes."""
    bubble = split_bubble(timeline)
    parts = {
        "warm-up and cool-down": share_text(bubble.warm_up_and_cool_down),
        "imbalance": share_text(bubble.imbalance),
        "exposed transfer": share_text(bubble.exposed_transfer),
    }
    present = [f"{name} {share}" for name, share in parts.items() if share != "0%"]
    return f" ({', '.join(present)})" if len(present) > 1 else ""


def mean_times(panel: Panel) -> str:
    """Format the mean time of each kind of action, such as `F 1, B 2`."""
    return ", ".join(
        f"{kind.letter} {time_text(math.fsum(times) / len(times), panel.in_microseconds)}"
        for kind in kinds_of([panel])
        if (times := [end - start for events in panel.timeline.ranks for a, start, end in events if a.kind is kind])
    )


def idle_shares(timeline: Timeline) -> list[float]:
    """Compute each rank's idle share of the step."""
    step_time = timeline.step_time
    return [idle / step_time if step_time else 0.0 for idle in timeline.idle]


def end_of(panels: Sequence[Panel]) -> float:
    """Compute where the common time axis ends."""
    return max(panel.timeline.step_time for panel in panels)


__all__ = [
    "MEANINGS",
    "Drawn",
    "Event",
    "Panel",
    "caption",
    "chunks",
    "end_of",
    "frees",
    "idle_shares",
    "is_linear",
    "kinds_of",
    "letter_and_microbatch",
    "live_activations",
    "mean_times",
    "number_text",
    "panels_of",
    "peaks",
    "row_name",
    "share_text",
    "short_label",
    "splits_backward",
    "ticks",
    "time_text",
    "time_unit",
]
