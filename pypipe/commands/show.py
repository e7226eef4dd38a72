"""`pypipe show`: finds or builds a program or a trace, and draws its timeline."""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pypipe.commands.conventions import BadInput, json_option
from pypipe.program import (
    Program,
    add_stage_actions,
    build,
    builder_names,
    did_you_mean,
    find_builder,
    loads_csv,
    prepare,
    simulate,
    spelled,
)
from pypipe.program.drawing import Panel, chrome_trace, html, read_chrome_trace, svg, terminal
from pypipe.program.simulation.shares import by_stage

_WIDTH_OF_A_FILE = 160
_PLAIN = str.maketrans("·─▒µ", ".-#u")


class ShowError(ValueError):
    """What cannot be shown or written; the message says what to do instead."""


@dataclass(frozen=True)
class Times:
    """What is given as `--tf` and its like: one number, or several with commas between.

    The first three mean what they mean to `pypipe plan`: a rank's whole share of the model, divided evenly among its
    stages. They take one number for each rank too, or one for each stage, which is then that stage's own.

    Args:
        forward: time of a rank's forward.
        backward: time of its backward's input half, I.
        weight: time of its weight half, W. A whole backward, B, takes both.
        transfer: latency of a hop from rank to rank.
        reduce: time of a REDUCE_GRAD; given, each stage has one, as under DistributedDataParallel.
        unshard: time of an UNSHARD; given, each stage has one, as under fully_shard.
    """

    forward: str | None = None
    backward: str | None = None
    weight: str | None = None
    transfer: str | None = None
    reduce: str | None = None
    unshard: str | None = None

    def of(self, program: Program) -> Panel:
        """The program in simulated time.

        Raises:
            ShowError: a time is not a number from 0 on, or there are neither as many as ranks nor as stages.
            ProgramError: the program cannot be simulated.
        """
        stages = range(program.n_stages)
        program = add_stage_actions(
            program,
            reduced=stages if self.reduce is not None else (),
            sharded=stages if self.unshard is not None else (),
        )
        timeline = simulate(
            program,
            **self.costs(program),
            reduce_grad=_of_stages("--tr", self.reduce or "0", program.n_stages),
            unshard=_of_stages("--tu", self.unshard or "0", program.n_stages),
        )
        return Panel(timeline)

    def costs(self, program: Program) -> dict[str, Any]:
        """The arguments for `simulate`, and for a builder that makes programs to measure.

        Args:
            program: for its ranks and stages.

        Raises:
            ShowError: as above.
        """
        forward = _of_shares("--tf", self.forward or "1", program)
        half = _of_shares("--tb", self.backward or "1", program)
        weight = _of_shares("--tw", self.weight or "1", program)
        return {
            "forward": forward,
            "backward": [i + w for i, w in zip(half, weight, strict=True)],
            "input_backward": half,
            "weight_backward": weight,
            "hop": _of_stages("--tc", self.transfer or "0", program.n_stages),
        }

    @property
    def given(self) -> bool:
        """Whether there is any."""
        every = (self.forward, self.backward, self.weight, self.transfer, self.reduce, self.unshard)
        return any(each is not None for each in every)


@click.command("show")
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("-p", "--ranks", type=int, help="P, the number of ranks.", show_default=False)
@click.option("-m", "--microbatches", type=int, help="M, the number of microbatches.", show_default=False)
@click.option("-v", "--stages-per-rank", type=int, help="Stages on each rank, for schedules that have several.")
@click.option(
    "--tf", help="Time of a rank's forward: one number, or one for each rank or stage, as 1,1,2,1.  [default: 1]"
)
@click.option("--tb", help="The same for the input half of its backward, I.  [default: 1]")
@click.option("--tw", help="The same for the weight half, W; a whole backward takes both.  [default: 1]")
@click.option("--tc", help="Latency of a transfer from rank to rank.  [default: 0]")
@click.option(
    "--tr", help="Time in which a stage's replicas reduce its gradients, once a step.  [default: no replicas]"
)
@click.option("--tu", help="Time in which they gather its sharded parameters, once a step.  [default: not sharded]")
@click.option("--svg", type=click.Path(path_type=Path), help="Write the timeline as SVG into this file.")
@click.option("--html", type=click.Path(path_type=Path), help="Write it as one HTML page with zoom.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write it as a Chrome trace, for Perfetto.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Show what the ranks did last before a failure, from the records in this folder (PYPIPE_RECORD_DIR).",
)
@json_option
def command(
    names: tuple[str, ...],
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    tf: str | None,
    tb: str | None,
    tw: str | None,
    tc: str | None,
    tr: str | None,
    tu: str | None,
    record: Path | None,
    as_json: bool,
    **files: Path | None,
) -> None:
    """Draw the timeline of a schedule, a program or a trace, or several below each other.

    NAME is a schedule's name, such as 1f1b; a CSV file with a program; or a .json file, such as --trace wrote. Times
    are in a unit of yours; a trace takes them as microseconds.
    """
    if record is not None:
        from pypipe.runtime.diagnostics import flight_record

        try:
            click.echo(flight_record.timeline(flight_record.find(record)))
        except flight_record.FlightError as error:
            raise BadInput(str(error)) from error
        return
    if not names:
        raise BadInput("give the name of a schedule or a file, or --record with a folder")

    try:
        panels = panels_for(names, ranks, microbatches, stages_per_rank, Times(tf, tb, tw, tc, tr, tu))
        for kind, path in files.items():
            if path is not None:
                write(panels, f"--{kind}", path)
                click.echo(f"wrote {path}", err=True)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if as_json:
        click.echo(json.dumps([_data(panel) for panel in panels]))
        return
    # Without a stop at bytes that are colours: whether there are any is decided already.
    click.echo(picture(panels), color=True)


def panels_for(
    names: Sequence[str], ranks: int | None, microbatches: int | None, per_rank: int | None, times: Times
) -> list[Panel]:
    """What names mean, each: a schedule of the registry, or a file.

    Args:
        names: registered names, or paths: of a saved trace (`.json`), or else of a program in CSV.
        ranks: P, for registered names.
        microbatches: M, for registered names.
        per_rank: v, for registered names; it must be what each of them has, or can have.
        times: of the actions of programs; a trace has its own.

    Raises:
        ShowError, ConfigurationError, ProgramError: all of them ValueErrors, for the user.
    """
    names = [_registered(name) or name for name in names]
    registered = [name for name in names if name in builder_names()]
    files = [name for name in names if name not in registered]
    for name in files:
        if not Path(name).is_file():
            raise ShowError(
                f"{name} is not a file, and not a schedule{did_you_mean(name, builder_names())}: give a file, or one "
                f"of {', '.join(builder_names())}"
            )
    if registered and (ranks is None or microbatches is None):
        what = "a number of ranks and of microbatches"
        raise ShowError(f"{registered[0]} needs {what}: give -p and -m, such as -p 4 -m 8")
    for option, number in {"-p": ranks, "-m": microbatches, "-v": per_rank}.items():
        if number is not None and not registered:
            raise ShowError(f"{option} is for schedules with a name; {files[0]} has its own number: leave it out")
    if times.given and all(Path(name).suffix == ".json" for name in names):
        raise ShowError(
            "--tf, --tb, --tw, --tc, --tr and --tu are for programs; a trace has its own times: leave them out"
        )
    panels = []
    for name in names:
        if name in registered:
            assert ranks is not None
            assert microbatches is not None
            panels.append(times.of(prepare(_built(name, ranks, microbatches, per_rank, times)).program))
        elif Path(name).suffix == ".json":
            try:
                panels += read_chrome_trace(_text(name))
            except ValueError as error:
                raise error if isinstance(error, ShowError) else ShowError(f"{name}: {error}") from error
        else:
            panels.append(times.of(prepare(loads_csv(_text(name), name=Path(name).stem, source=name)).program))
    return panels


def _registered(name: str) -> str | None:
    """The registered name that is meant, unless it is exactly a file's."""
    known = builder_names()
    return name if name in known else None if Path(name).is_file() else spelled(name, known)


def _text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ShowError(f"cannot read {name} ({error.strerror}): give a readable file") from error
    except UnicodeDecodeError as error:
        raise ShowError(f"{name} is not UTF-8 at byte {error.start}: give a program in CSV, or a trace") from error


def picture(panels: list[Panel]) -> str:
    """The timelines for the terminal that is there, or else for a file 160 columns wide."""
    console = Console()
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    text = terminal(
        *panels,
        width=shutil.get_terminal_size().columns if narrow else _WIDTH_OF_A_FILE,
        colour=console.color_system is not None and not console.no_color,
    )
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return text.translate(_PLAIN)
    return text


def write(panels: list[Panel], option: str, path: Path) -> None:
    """Writes a view of timelines into a file.

    Args:
        option: `--svg`, `--html` or `--trace`: what to write.
        path: the file.

    Raises:
        ShowError: it cannot be written.
    """
    draw, ending = {"--svg": (svg, ".svg"), "--html": (html, ".html"), "--trace": (chrome_trace, ".json")}[option]
    if path.suffix not in ("", ending):
        raise ShowError(f"{option} does not write {path.suffix} files: give it a name that ends in {ending}")
    text = draw(*panels)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShowError(f"cannot write {path} ({error.strerror}): give {option} a file that can be written") from error


def _data(panel: Panel) -> dict[str, Any]:
    """A timeline as JSON values. Times are in the unit of the costs, or in microseconds if they were measured."""
    timeline = panel.timeline
    per_rank = len(timeline.program.chains[0].stages) / timeline.program.n_ranks
    return {
        "name": panel.title or timeline.program.name,
        "n_ranks": timeline.program.n_ranks,
        "n_microbatches": timeline.program.n_microbatches,
        "in_microseconds": panel.in_microseconds,
        "step_time": timeline.step_time,
        "bubble_ratio": timeline.bubble_ratio,
        "peak_activations": [peak / per_rank for peak in timeline.peak_activations],
        "ranks": [[[str(action), start, end] for action, start, end in events] for events in timeline.ranks],
    }


def _built(name: str, ranks: int, microbatches: int, per_rank: int | None, times: Times) -> Program:
    takes = inspect.signature(find_builder(name)).parameters
    options: dict[str, Any] = {}
    if per_rank is not None and "stages_per_rank" in takes:
        options["stages_per_rank"] = per_rank
    costs: dict[str, Any] = {}
    if "input_backward" in takes and ranks > 0:
        n_stages = ranks * (per_rank or 1)
        costs = times.costs(Program(name, 1, tuple(stage % ranks for stage in range(n_stages)), ((),) * ranks))
    program = build(name, ranks, microbatches, **options, **costs)
    here = program.n_stages // program.n_ranks
    if per_rank is not None and per_rank != here:
        stages = "1 stage" if here == 1 else f"{here} stages"
        raise ShowError(f"-v {per_rank} does not fit: {name} puts {stages} on each rank; leave -v out")
    return program


def _of_shares(option: str, text: str, program: Program) -> list[float]:
    """One time for each stage, of times of ranks or of stages."""
    numbers = _numbers(option, text)
    if len(numbers) in (1, program.n_ranks):
        return by_stage(program, numbers)
    if len(numbers) != program.n_stages:
        some = f"for each of {program.n_ranks} ranks or {program.n_stages} stages"
        raise ShowError(f"{option} has {len(numbers)} times: give one number, or one {some}")
    return numbers


def _of_stages(option: str, text: str, n_stages: int) -> list[float]:
    """One time for each stage, of one time or as many."""
    numbers = _numbers(option, text)
    if len(numbers) not in (1, n_stages):
        raise ShowError(f"{option} has {len(numbers)} times for {n_stages} stages: give one number, or one a stage")
    return numbers * n_stages if len(numbers) == 1 else numbers


def _numbers(option: str, text: str) -> list[float]:
    numbers = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            raise ShowError(f"{option}: {part!r} is not a number: give a time, or several, as 1,1,2,1") from None
        if not 0 <= number < math.inf:
            raise ShowError(f"{option} is {part.strip()}: give a time from 0 on")
        numbers.append(number)
    return numbers
