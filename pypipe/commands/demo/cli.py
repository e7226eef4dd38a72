"""What `pypipe demo` takes and prints."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pypipe.commands.conventions import BadInput, json_option
from pypipe.commands.demo.options import DemoInputError, Options, check_trace, read_text
from pypipe.program import builder_names

if TYPE_CHECKING:
    from pypipe.commands.demo.run import Result

_DEFAULTS = Options()


@click.command("demo")
@click.option("--stages", default=_DEFAULTS.stages, help="Rank processes; each holds a stage or two of the model.")
@click.option("--schedule", default=_DEFAULTS.schedule, help=f"Order of actions: {', '.join(builder_names())}.")
@click.option("--microbatches", default=_DEFAULTS.microbatches, help="Slices of each batch.")
@click.option("--steps", default=_DEFAULTS.steps, help="Optimizer steps.")
@click.option("--batch", default=_DEFAULTS.batch, help="Sequences a step.")
@click.option("--context", default=_DEFAULTS.context, help="Characters a sequence.")
@click.option("--blocks", type=int, help="Transformer blocks of the whole model.  [default: 4, or one a stage]")
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
@json_option
def command(text: Path | None, trace: Path | None, as_json: bool, **options: Any) -> None:
    """Train a small GPT through a pipeline on this machine.

    A character-level GPT learns a real text, divided over processes; then the same model learns the same
    batches unpipelined, and the two loss curves are compared.
    """
    try:
        checked = Options(**options)
        checked.check()
        if trace is not None:
            check_trace(trace)
        content = read_text(text, checked.context)
    except DemoInputError as error:
        raise BadInput(str(error)) from error

    # What torch says where there is no NumPy, which nothing here needs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    from pypipe.commands.demo.run import run
    from pypipe.commands.launch import RankError

    try:
        result = run(checked, content, progress=not as_json, trace=trace)
        if trace is not None:
            click.echo(f"wrote {trace}", err=True)
    except RankError as error:
        raise click.ClickException(f"{error}\n{error.log}".strip()) from error
    except DemoInputError as error:
        raise BadInput(str(error)) from error
    if as_json:
        click.echo(json.dumps({name: value for name, value in asdict(result).items() if value is not None}))
    else:
        click.echo(_summary(result))


def _summary(result: Result) -> str:
    lines = [
        f"{result.schedule}, P={result.stages}, M={result.microbatches}, {result.steps} steps",
        f"loss               {result.losses[0]:.3f} -> {result.losses[-1]:.3f} nats a character",
        f"unpipelined        the same to within {result.loss_max_abs_diff:.1e} at every step",
        f"tokens per second  {result.tokens_per_second:,.0f}; {result.unpipelined_tokens_per_second:,.0f} unpipelined",
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
    others = "zbv" if result.schedule != "zbv" else "1f1b"
    setting = f"-p {result.stages} -m {result.microbatches}"
    lines += [
        "",
        "Try next:",
        f"  pypipe demo --schedule {others} --trace step.html   another schedule, and what each rank did",
        f"  pypipe show {result.schedule} {others} {setting}   both drawn",
        f"  pypipe plan {setting}   all schedules compared",
    ]
    return "\n".join(lines)
