"""The `pypipe` command. What a subcommand needs is imported when it runs: torch alone takes seconds."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pypipe.commands.demo.options import SCHEDULES, DemoInputError, Options, check_trace, read_text

if TYPE_CHECKING:
    from pypipe.commands.demo.run import Result

_DEFAULTS = Options()


class _BadInput(click.ClickException):
    """One line on stderr; the exit code is that of click's own complaints about options."""

    exit_code = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="pypipe")
def main() -> None:
    """Pipeline-parallel training for PyTorch."""


@main.command()
@click.option("--stages", default=_DEFAULTS.stages, help="Rank processes; each holds one stage of the model.")
@click.option("--schedule", default=_DEFAULTS.schedule, type=click.Choice(SCHEDULES), help="Order of actions.")
@click.option("--microbatches", default=_DEFAULTS.microbatches, help="Slices of each batch.")
@click.option("--steps", default=_DEFAULTS.steps, help="Optimizer steps.")
@click.option("--batch", default=_DEFAULTS.batch, help="Sequences a step.")
@click.option("--context", default=_DEFAULTS.context, help="Characters a sequence.")
@click.option("--blocks", default=_DEFAULTS.blocks, help="Transformer blocks of the whole model.")
@click.option("--width", default=_DEFAULTS.width, help="Size of the vectors between blocks.")
@click.option("--seed", default=_DEFAULTS.seed, help="Fixes the weights and the batches.")
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="UTF-8 file to learn, up to its first million characters.  [default: Python's standard library]",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Write what the ranks did in the last step: .json for Perfetto and `pypipe show`, .html or .svg.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object, nothing else.")
def demo(text: Path | None, trace: Path | None, as_json: bool, **options: int | str) -> None:
    """Train a small GPT through a pipeline on this machine.

    A character-level GPT learns a real text, divided over processes; then the same model learns the same
    batches unpipelined, and the two loss curves are compared.
    """
    try:
        checked = Options(**options)  # type: ignore[arg-type]  # click has made them what Options says
        checked.check()
        if trace is not None:
            check_trace(trace)
        content = read_text(text, checked.context)
    except DemoInputError as error:
        raise _BadInput(str(error)) from error

    # What torch says where there is no NumPy, which nothing here needs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    from pypipe.commands.demo.run import run
    from pypipe.commands.launch import RankError

    try:
        result = run(checked, content, progress=not as_json, trace=trace)
    except RankError as error:
        raise click.ClickException(f"{error}\n{error.log}".strip()) from error
    except DemoInputError as error:
        raise _BadInput(str(error)) from error
    if as_json:
        click.echo(json.dumps({name: value for name, value in asdict(result).items() if value is not None}))
    else:
        click.echo(_summary(result))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, nothing else.")
def bench(as_json: bool) -> None:
    """Measure the links between ranks: latency and bandwidth.

    Alone it measures two processes on this machine; under torchrun, every pair of the ranks it is given.
    """
    from pypipe.commands import bench as benchmark

    raise SystemExit(benchmark.main(as_json))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object, nothing else.")
def doctor(as_json: bool) -> None:
    """Show the libraries found here, and what is missing.

    The exit code is 0 unless something is broken; a machine without a GPU is not.
    """
    from pypipe.commands import doctor as examination

    raise SystemExit(examination.main(as_json))


@main.command()
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("-p", "--ranks", type=int, help="P, the number of ranks.", show_default=False)
@click.option("-m", "--microbatches", type=int, help="M, the number of microbatches.", show_default=False)
@click.option("-v", "--stages-per-rank", type=int, help="Stages on each rank, for schedules that have several.")
@click.option("--tf", help="Time of a forward: one number, or one for each stage, as 1,1,2,1.  [default: 1]")
@click.option("--tb", help="Time of a backward's input half, I.  [default: 1]")
@click.option(
    "--tw", help="Time of its weight half, W; a whole one takes both.  [default: --tb's where there are halves, else 0]"
)
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
def show(
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
            raise _BadInput(str(error)) from error
        return
    if not names:
        raise _BadInput("give the name of a schedule or a file, or --record with a folder")

    from pypipe.commands import show as views

    try:
        panels = views.panels_for(names, ranks, microbatches, stages_per_rank, views.Times(tf, tb, tw, tc, tr, tu))
        for kind, path in files.items():
            if path is not None:
                views.write(panels, f"--{kind}", path)
    except ValueError as error:
        raise _BadInput(str(error)) from error
    # Without a stop at bytes that are colours: whether there are any is decided already.
    click.echo(views.picture(panels), color=True)


@main.command()
@click.option("-p", "--ranks", type=int, required=True, help="P, the number of ranks.")
@click.option("-m", "--microbatches", type=int, required=True, help="M, the number of microbatches.")
@click.option("-v", "--stages-per-rank", type=int, help="Stages on each rank, for schedules that let one choose.")
@click.option("--tf", default="1", help="Time of one rank's forward of one microbatch; or P times, as 1,1,2,1.")
@click.option("--tb", default="1", help="The same for the backward's input half, I.")
@click.option("--tw", default="1", help="The same for its weight half, W; a whole backward takes both.")
@click.option("--tc", default="0", help="Latency of a transfer from rank to rank.")
@click.option("--unit", help="Unit of the times: us, ms or s.")
@click.option("--memory", type=float, help="Most activations of one microbatch that a rank may keep; or GB, if:")
@click.option("--activation", help="GB of one microbatch's activations on one rank; or P sizes.")
@click.option("--batch", type=int, help="Sequences a step; with --sequence and --hidden, for the bytes over the cuts.")
@click.option("--sequence", type=int, help="Tokens a sequence.")
@click.option("--hidden", type=int, help="Size of the vector that each token sends over a cut.")
@click.option("--dtype", help="Its dtype, such as bf16 or float32.  [default: bf16]")
@click.option("--bandwidth", type=float, help="GB/s of a link: then a transfer also takes its bytes' time.")
@click.option("--search/--no-search", default=True, help="Search for a program made to measure: the row auto.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as one JSON object, nothing else.")
def plan(tf: str, tb: str, tw: str, tc: str, search: bool, as_json: bool, **options: Any) -> None:
    """Compare all schedules for a number of ranks, measured times and memory.

    Every schedule is built, verified and simulated, and one is searched for; the best that fits is marked. Times and
    activations (A) are a rank's whole share of the model for one microbatch.
    """
    from pypipe.commands import plan as planning

    try:
        request = planning.request_from(times={"tf": tf, "tb": tb, "tw": tw, "tc": tc}, **options)
        text = planning.run(request, as_json=as_json, search=search)
    except ValueError as error:
        raise _BadInput(str(error)) from error
    click.echo(text, color=True)


def _summary(result: Result) -> str:
    lines = [
        f"{result.schedule}, P={result.stages}, M={result.microbatches}, {result.steps} steps",
        f"loss               {result.losses[0]:.3f} -> {result.losses[-1]:.3f} nats a character",
        f"unpipelined        the same to within {result.loss_max_abs_diff:.1e} at every step",
        f"tokens per second  {result.tokens_per_second:,.0f}",
        f"bubble             {result.bubble_measured:.1%} measured, {result.bubble_predicted:.1%} predicted",
    ]
    if result.traced is not None:
        traced = result.traced
        lines.append(f"last step          {traced.step_seconds * 1e3:.1f} ms, bubble {traced.bubble:.1%}, which is")
        lines.append(f"                   warm-up and cool-down {traced.warm_up_and_cool_down:.1%}")
        lines.append(f"                   imbalance             {traced.imbalance:.1%}")
        lines.append(f"                   exposed transfer      {traced.exposed_transfer:.1%}")
    cores = len(os.sched_getaffinity(0))
    if result.stages > cores:
        lines.append(f"The prediction takes a core per rank; here {result.stages} ranks took turns on {cores}.")
    return "\n".join(lines)
