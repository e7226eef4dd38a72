"""`pypipe plan`: schedules side by side, as a table that fits the terminal, or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from pypipe.commands.conventions import BadInput, json_option, rendered
from pypipe.planning import Comparison, PlanError, Request, Row, Traffic, advise, compare, plan_options
from pypipe.program.drawing import read_chrome_trace

_WIDTH_OF_A_FILE = 120
_BAD_WITHOUT = "give it with --batch, --sequence and --hidden"


@click.command("plan")
@click.option("-p", "--ranks", type=int, help="P, the number of ranks.")
@click.option("-m", "--microbatches", type=int, help="M, the number of microbatches.")
@click.option(
    "--from",
    "trace",
    type=click.Path(path_type=Path),
    help="Take -p, -m, --unit and the times from a trace that schedule.trace() saved, where they are not given.",
)
@click.option("-v", "--stages-per-rank", type=int, help="Stages on each rank, for schedules that let one choose.")
@click.option("--tf", help="Time of one rank's forward of one microbatch; or P times, as 1,1,2,1.  [default: 1]")
@click.option("--tb", help="The same for the backward's input half, I.  [default: 1]")
@click.option("--tw", help="The same for its weight half, W; a whole backward takes both.  [default: 1]")
@click.option("--tc", default="0", help="Latency of a transfer from rank to rank.")
@click.option("--unit", help="Unit of the times: us, ms or s.")
@click.option("--memory", type=float, help="Most activations of one microbatch that a rank may keep; or GB, if:")
@click.option("--activation", help="GB of one microbatch's activations on one rank; or P sizes.")
@click.option("--batch", type=int, help="Sequences a step; with --sequence and --hidden, for the bytes over the cuts.")
@click.option("--sequence", type=int, help="Tokens a sequence.")
@click.option("--hidden", type=int, help="Size of the vector that each token sends over a cut.")
@click.option("--dtype", help="Its dtype, such as bf16 or float32.  [default: bf16]")
@click.option("--bandwidth", type=float, help="GB/s of a link: then a transfer also takes its bytes' time.")
@click.option(
    "--two-copies", is_flag=True, help="Mark a schedule that keeps two copies of the parameters, if it is best."
)
@click.option("--search/--no-search", default=True, help="Search for a program made to measure: the row auto.")
@json_option
def command(trace: Path | None, search: bool, two_copies: bool, as_json: bool, **options: Any) -> None:
    """Compare all schedules for a number of ranks, measured times and memory.

    Every schedule is built, verified and simulated, and one is searched for; the best that fits, with one copy of the
    parameters, is marked. Times and activations (A) are a rank's whole share of the model for one microbatch.
    """
    try:
        options = _with_defaults(options, {} if trace is None else _measured(trace))
        request = request_from(times={name: options.pop(name) for name in ("tf", "tb", "tw", "tc")}, **options)
        text = run(request, as_json=as_json, search=search, two_copies=two_copies)
    except ValueError as error:
        raise BadInput(str(error)) from error
    click.echo(text, color=True)


def _measured(path: Path) -> dict[str, str]:
    """The options that a saved trace stands for.

    Raises:
        PlanError: the file is not a trace of measured steps.
    """
    try:
        panels = read_chrome_trace(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"--from {path}: {getattr(error, 'strerror', None) or error}: give a saved trace") from error
    measured = next((panel for panel in panels if panel.in_microseconds), None)
    if measured is None:
        raise PlanError(f"--from {path}: its times were simulated: give a trace that schedule.trace() has measured")
    return {option.removeprefix("--"): text for option, text in plan_options(measured.timeline).items()}


def _with_defaults(options: dict[str, Any], measured: dict[str, str]) -> dict[str, Any]:
    """The options that were given, else those of a trace, else the defaults.

    Raises:
        PlanError: a number that has no default is missing.
    """
    defaults = {"tf": "1", "tb": "1", "tw": "1"} | measured
    full = {name: defaults.get(name) if value is None else value for name, value in options.items()}
    for name, option in (("ranks", "-p"), ("microbatches", "-m")):
        number = full[name]
        if number is None:
            raise PlanError(f"{option} is missing: give the number of {name}, or a trace with --from")
        full[name] = int(number)
    return full


def request_from(
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None,
    times: dict[str, str],
    memory: float | None,
    activation: str | None,
    unit: str | None,
    batch: int | None,
    sequence: int | None,
    hidden: int | None,
    dtype: str | None,
    bandwidth: float | None,
) -> Request:
    """What the options say.

    Args:
        times: the texts of --tf, --tb, --tw and --tc, by these names without dashes.

    Raises:
        PlanError: they say what cannot be.
    """
    shape = {"--batch": batch, "--sequence": sequence, "--hidden": hidden}
    missing = [option for option, value in shape.items() if value is None]
    traffic = None
    if len(missing) < len(shape):
        if missing:
            raise PlanError(f"{' and '.join(missing)}: missing; bytes need --batch, --sequence and --hidden together")
        assert batch is not None
        assert sequence is not None
        assert hidden is not None
        traffic = Traffic(batch, sequence, hidden, dtype or "bf16", bandwidth)
    elif dtype is not None or bandwidth is not None:
        raise PlanError(f"{'--dtype' if dtype is not None else '--bandwidth'} says nothing alone: {_BAD_WITHOUT}")
    hops = _numbers("--tc", times["tc"])
    if len(hops) != 1:
        raise PlanError(f"--tc has {len(hops)} times: give one number")
    return Request(
        n_ranks=ranks,
        n_microbatches=microbatches,
        forward=_numbers("--tf", times["tf"]),
        input_backward=_numbers("--tb", times["tb"]),
        weight_backward=_numbers("--tw", times["tw"]),
        hop=hops[0],
        stages_per_rank=stages_per_rank,
        memory=memory,
        activation=None if activation is None else _numbers("--activation", activation),
        unit=unit,
        traffic=traffic,
    )


def run(request: Request, *, as_json: bool, search: bool, two_copies: bool) -> str:
    """Compares, and says what is to be printed."""
    errors = Console(stderr=True)
    if as_json or not errors.is_terminal:
        return show(compare(request, search=search, two_copies=two_copies), as_json)
    with errors.status("") as status:
        comparison = compare(
            request, search=search, two_copies=two_copies, progress=lambda name: status.update(f"{name} ...")
        )
    return show(comparison, as_json)


def show(comparison: Comparison, as_json: bool) -> str:
    """A comparison as text for the terminal that is there, or as JSON."""
    if as_json:
        return json.dumps(_data(comparison))
    return rendered(lambda console: _print(console, comparison), _WIDTH_OF_A_FILE)


def _data(comparison: Comparison) -> dict[str, Any]:
    request, best = comparison.request, comparison.best
    data: dict[str, Any] = {
        "schedules": [_row_data(row, request) for row in comparison.rows],
        "best": None if best is None else best.name,
        "unavailable": [{"name": name, "reason": reason} for name, reason in comparison.unavailable],
        "advice": advise(comparison),
    }
    if request.traffic is not None:
        cuts = request.n_ranks - 1
        data["traffic"] = {
            "bytes_per_cut_and_direction": request.traffic.cut_bytes,
            "cuts": cuts,
            "bytes_per_step": request.traffic.step_bytes(cuts),
        }
    return data


def _row_data(row: Row, request: Request) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": row.name,
        "step_time": row.step_time,
        "bubble_ratio": row.bubble_ratio,
        "bubble_ratio_by_span": row.bubble_ratio_by_span,
        "peak_activations": list(row.peak_activations),
        "peak_memory": list(row.peak_memory),
        "transfers": row.transfers,
        "verified": row.verified,
        "stages_per_rank": row.stages_per_rank,
        "copies": row.copies,
        "exposed_transfer": list(row.exposed_transfer),
        "fits": row.fits,
        "best": row.is_best,
    }
    if request.traffic is not None:
        data["bytes"] = row.transfers * request.message_bytes
    return data


def _print(console: Console, comparison: Comparison) -> None:
    request, best = comparison.request, comparison.best
    unit = _unit(request)
    console.print(
        f"P = {request.n_ranks}, M = {request.n_microbatches}; a rank computes {_number(request.work)}{unit} a step"
        + ("" if request.memory is None else f"; memory for {request.amount(request.memory)}"),
        highlight=False,
    )
    console.print()
    table = _table(console, comparison)
    console.print(table)
    if best is not None:
        cap = "" if request.memory is None else f" within {request.amount(request.memory)}"
        console.print(f"* the shortest step{cap}: {best.name}{_beside(best, comparison)}", highlight=False)
    if request.memory is not None and not all(row.fits for row in comparison.rows):
        console.print(f"! more than {request.amount(request.memory)} on some rank", highlight=False)
    for name, reason in comparison.unavailable:
        console.print(f"- {name} cannot be built: {reason}", highlight=False, markup=False)
    for row in comparison.rows:
        if row.problem:
            console.print(f"- {row.name} is not sound: {row.problem}", highlight=False, markup=False)
    console.print()
    console.print(_terms(comparison, [str(column.header) for column in table.columns]), highlight=False)
    if request.traffic is not None:
        console.print()
        console.print(_traffic(request, request.traffic), highlight=False)
    for sentence in advise(comparison):
        console.print()
        console.print(sentence, highlight=False, markup=False)


def _beside(best: Row, comparison: Comparison) -> str:
    """What to weigh the best schedule against, where the shortest step takes two copies of the parameters."""
    usable = [row for row in comparison.rows if row.fits and row.verified]
    if best.copies > 1:
        others = [row for row in usable if row.copies == 1]
        said = f"{best.copies}x parameters; with one copy of them"
    else:
        others = [row for row in usable if row.copies > 1 and row.step_time < best.step_time]
        said = "with 2x parameters"
    if not others:
        return ""
    return f" ({said} {others[0].name}, {_number(others[0].step_time, [row.step_time for row in comparison.rows])})"


def _terms(comparison: Comparison, shown: Sequence[str]) -> str:
    """What the table's columns mean."""
    a = "one microbatch's activations on one rank"
    terms = {
        "bubble": "bubble: the idle share of all ranks' time, from the start of the step to its end",
        "bubble by span": "by span: the same from a rank's own first action to its last, as where steps overlap",
        "peak": f"peak: the most that a rank keeps (A: {a})",
        "transfers": "transfers: messages between ranks in a step",
        "notes": "v: stages on each rank, where it is not 1",
    }
    if comparison.request.activation is not None:
        terms["peak"] = "peak: the most that a rank's activations take"
    if all(row.stages_per_rank == 1 for row in comparison.rows):
        del terms["notes"]
    return "; ".join(text for column, text in terms.items() if column in shown) + "."


def _traffic(request: Request, traffic: Traffic) -> str:
    cuts = request.n_ranks - 1
    text = f"A cut carries {_size(traffic.cut_bytes)} a step in each direction ({traffic.batch} x {traffic.sequence} x "
    text += f"{traffic.hidden} in {traffic.dtype}); {cuts} {'cut' if cuts == 1 else 'cuts'} of one stage a rank, "
    text += f"{_size(traffic.step_bytes(cuts))} a step."
    if traffic.bandwidth is not None:
        time = request.message_bytes / request.bandwidth
        text += f" A message of {_size(request.message_bytes)} takes {_number(time)}{_unit(request)} at "
        text += f"{traffic.bandwidth:g} GB/s, beside the latency of {_number(request.hop)}{_unit(request)}."
    return text


# The columns, and which of them may go, the first first, where the terminal is too narrow for all.
_DISPENSABLE = ("transfers", "bubble by span", "sent", "notes")


def _table(console: Console, comparison: Comparison) -> Table:
    dropped: list[str] = []
    while True:
        table = _table_without(comparison, dropped)
        left = [column for column in _DISPENSABLE if column not in dropped]
        if Measurement.get(console, console.options.update(max_width=1000), table).maximum <= console.width or not left:
            return table
        dropped.append(left[0])


def _table_without(comparison: Comparison, dropped: Sequence[str]) -> Table:
    request, best = comparison.request, comparison.best
    steps = [row.step_time for row in comparison.rows]
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="bold")
    cells: dict[str, list[str]] = {
        "schedule": [f"{_mark(row)} {row.name}" for row in comparison.rows],
        "step": [f"{_number(row.step_time, steps)}{_unit(request)}" for row in comparison.rows],
        "bubble": [f"{row.bubble_ratio:.2%}" for row in comparison.rows],
        "bubble by span": [f"{row.bubble_ratio_by_span:.2%}" for row in comparison.rows],
        "peak": [request.amount(max(row.peak_memory)) for row in comparison.rows],
        "transfers": [str(row.transfers) for row in comparison.rows],
    }
    if request.traffic is not None:
        cells["sent"] = [_size(row.transfers * request.message_bytes) for row in comparison.rows]
    cells["notes"] = [_notes(row, request) for row in comparison.rows]
    shown = {name: column for name, column in cells.items() if name not in dropped}
    for name in shown:
        left = name in ("schedule", "notes")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for index, row in enumerate(comparison.rows):
        style = "bold green" if row is best else "" if row.fits and row.verified else "dim"
        table.add_row(*(column[index] for column in shown.values()), style=style)
    return table


def _mark(row: Row) -> str:
    return "*" if row.is_best else " " if row.fits and row.verified else "!"


def _notes(row: Row, request: Request) -> str:
    notes = []
    if not row.fits:
        notes.append("too much memory")
    if not row.verified:
        notes.append("not sound")
    if row.copies > 1:
        notes.append(f"{row.copies}x parameters")
    if row.stages_per_rank > 1:
        notes.append(f"v = {row.stages_per_rank}")
    return ", ".join(notes)


def _numbers(option: str, text: str) -> tuple[float, ...]:
    numbers = []
    for part in text.split(","):
        try:
            numbers.append(float(part))
        except ValueError:
            raise PlanError(f"{option}: {part!r} is not a number: give one, or one for each rank with commas") from None
    return tuple(numbers)


def _number(value: float, among: Sequence[float] = ()) -> str:
    """With commas, and with as many decimals as show four digits of the smallest among some, if any is not whole."""
    values = among or (value,)
    digits = 1 + math.floor(math.log10(min(abs(each) for each in values if each))) if any(values) else 1
    decimals = max(0, 4 - digits) if any(each % 1 for each in values) else 0
    return f"{value:,.{decimals}f}"


def _unit(request: Request) -> str:
    return "" if request.unit is None else f" {request.unit}"


def _size(n_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes:.3g} B"
