"""The demo: a small GPT, trained in a pipeline of processes on this machine and then unpipelined."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pypipe.commands.demo.meter import WARM_UP, Meter, StepReport, TraceReport
from pypipe.commands.demo.options import DemoInputError, Options
from pypipe.commands.launch import Ranks
from pypipe.program import split_bubble
from pypipe.program.drawing import html, read_chrome_trace, svg

# The progress bar's figures cover this many steps.
_RECENT = 20

# Where stderr is not a terminal.
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Traced:
    """The traced step; the bubble's parts are shares of ranks x step, as `pypipe.program.split_bubble` has them."""

    step_seconds: float
    bubble: float
    warm_up_and_cool_down: float
    imbalance: float
    exposed_transfer: float


@dataclass(frozen=True)
class Result:
    """What a run showed; the fields are those of `pypipe demo --json`.

    Args:
        losses: of the pipelined training, in nats a character, one a step.
        loss_max_abs_diff: the largest difference between those and the unpipelined training's.
        tokens_per_second: characters the pipeline trained on per second, after the first steps.
        unpipelined_tokens_per_second: the same of the unpipelined training, which has all cores to itself.
        bubble_measured: the ranks' mean idle share of a step.
        bubble_predicted: the same of the simulated program, given the stages' own measured times.
        traced: of the step that was traced, if one was.
    """

    schedule: str
    stages: int
    microbatches: int
    steps: int
    losses: list[float]
    loss_max_abs_diff: float
    tokens_per_second: float
    unpipelined_tokens_per_second: float
    bubble_measured: float
    bubble_predicted: float
    traced: Traced | None


def run(options: Options, text: str, *, progress: bool, trace: Path | None = None) -> Result:
    """Trains as `options` say, pipelined and then unpipelined.

    Args:
        options: checked.
        text: longer than options.context.
        progress: draw a progress bar on stderr, if that is a terminal.
        trace: a file for a trace of the last step, beside its prediction; its ending says what is written.

    Raises:
        DemoInputError: that file cannot be written.
        RankError: a rank raised, died or hung; no process is left behind.
    """
    with _Bar(options, progress) as bar:
        meter, traced = _train_pipelined(options, text, bar, trace is not None)
        # Only now, as it costs seconds: checking input and watching the ranks need no torch.
        bar.show("unpipelined", 0, "starting")
        from pypipe.commands.demo.training import train_unpipelined

        difference, seconds, begun = 0.0, [], time.perf_counter()
        for step, loss in enumerate(train_unpipelined(options, text)):
            seconds.append(time.perf_counter() - begun)
            difference = max(difference, abs(loss - meter.losses[step]))
            bar.show("unpipelined", step + 1, f"loss {loss:.3f}  largest difference {difference:.1e}")
            begun = time.perf_counter()
    return Result(
        schedule=options.schedule,
        stages=options.stages,
        microbatches=options.microbatches,
        steps=options.steps,
        losses=meter.losses,
        loss_max_abs_diff=difference,
        tokens_per_second=meter.tokens_per_second(),
        unpipelined_tokens_per_second=options.batch * options.context / fmean(seconds[WARM_UP:] or seconds),
        bubble_measured=meter.bubble_measured(),
        bubble_predicted=meter.bubble_predicted(),
        traced=_written(traced, trace) if trace is not None else None,
    )


def _written(text: str, path: Path) -> Traced:
    """Writes a trace, and returns its figures."""
    panels = read_chrome_trace(text)
    draw = {".json": lambda *_: text, ".html": html, ".svg": svg}[path.suffix]
    try:
        path.write_text(draw(*panels), encoding="utf-8")
    except OSError as error:
        raise DemoInputError(f"cannot write {path} ({error.strerror}): give --trace another file") from error
    measured = panels[0].timeline
    bubble = split_bubble(measured)
    return Traced(
        step_seconds=measured.step_time / 1e6,
        bubble=measured.bubble_ratio,
        warm_up_and_cool_down=bubble.warm_up_and_cool_down,
        imbalance=bubble.imbalance,
        exposed_transfer=bubble.exposed_transfer,
    )


def _train_pipelined(options: Options, text: str, bar: _Bar, traced: bool) -> tuple[Meter, str]:
    meter = Meter(options.program, options.batch * options.context)
    bar.show("pipelined", 0, f"starting {options.stages} ranks")
    with tempfile.TemporaryDirectory(prefix="pypipe-demo-") as folder:
        scratch = Path(folder)
        (scratch / "text").write_text(text, encoding="utf-8", newline="")
        trace = ""
        with Ranks(_rank, options.stages, (options, scratch, traced), scratch) as ranks:
            for rank, report in ranks.reports():
                if isinstance(report, TraceReport):
                    trace = report.text
                    continue
                shown = meter.steps
                meter.add(rank, report)
                if meter.steps > shown:
                    bar.show(
                        "pipelined",
                        meter.steps,
                        f"loss {meter.losses[meter.steps - 1]:.3f}"
                        f"  {meter.tokens_per_second(_RECENT):,.0f} tokens/s"
                        f"  bubble {meter.bubble_measured(_RECENT):.0%}"
                        f" (predicted {meter.bubble_predicted(_RECENT):.0%})",
                    )
    return meter, trace


def _rank(
    rank: int, report: Callable[[StepReport | TraceReport], None], options: Options, scratch: Path, traced: bool
) -> None:
    """What a rank's process runs. torch is imported in here, where a failure to do so is heard of."""
    from pypipe.commands.demo.training import train_rank

    with (scratch / "text").open(encoding="utf-8", newline="") as file:
        text = file.read()
    train_rank(rank, report, options, text, scratch / "store", traced)


class _Bar:
    """Two progress bars on stderr, one a training; where stderr is not a terminal, a line now and then."""

    def __init__(self, options: Options, wanted: bool) -> None:
        self._steps = options.steps
        self._tasks: dict[str, TaskID] = {}
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._prints_lines = wanted and sys.stderr is not None and not is_terminal
        self._last_line = -math.inf
        self._progress = Progress(
            TextColumn("{task.description:11}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True),
            expand=True,
            disable=not (wanted and is_terminal),
        )

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, training: str, step: int, figures: str) -> None:
        """Moves a training's bar to a step, with its figures beside it."""
        now = time.monotonic()
        if self._prints_lines and (training not in self._tasks or now - self._last_line > _SECONDS_BETWEEN_LINES):
            print(f"{training}: step {step} of {self._steps}: {figures}", file=sys.stderr, flush=True)
            self._last_line = now
        if training not in self._tasks:
            self._tasks[training] = self._progress.add_task(training, total=self._steps, figures=figures)
        self._progress.update(self._tasks[training], completed=step, figures=figures)
