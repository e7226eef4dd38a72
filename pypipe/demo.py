"""The demo: a small GPT, trained in a pipeline of processes on this machine and then unpipelined."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from pypipe.demo_input import Options
from pypipe.demo_meter import Meter, StepReport
from pypipe.launch import Ranks

# The progress bar's figures cover this many steps.
_RECENT = 20


@dataclass(frozen=True)
class Result:
    """What a run showed; the fields are those of `pypipe demo --json`.

    Args:
        losses: of the pipelined training, in nats a character, one a step.
        loss_max_abs_diff: the largest difference between those and the unpipelined training's.
        tokens_per_second: characters the pipeline trained on per second, after the first steps.
        bubble_measured: the ranks' mean idle share of a step.
        bubble_predicted: the same of the simulated program, given the stages' own measured times.
    """

    schedule: str
    stages: int
    microbatches: int
    steps: int
    losses: list[float]
    loss_max_abs_diff: float
    tokens_per_second: float
    bubble_measured: float
    bubble_predicted: float


def run(options: Options, text: str, *, progress: bool) -> Result:
    """Trains as `options` say, pipelined and then unpipelined.

    Args:
        options: checked.
        text: longer than options.context.
        progress: draw a progress bar on stderr, if that is a terminal.

    Raises:
        RankError: a rank raised, died or hung; no process is left behind.
    """
    with _Bar(options, progress) as bar:
        meter = _train_pipelined(options, text, bar)
        # Only now, as it costs seconds: checking input and watching the ranks need no torch.
        from pypipe.demo_train import train_unpipelined

        difference = 0.0
        for step, loss in enumerate(train_unpipelined(options, text)):
            difference = max(difference, abs(loss - meter.losses[step]))
            bar.show("unpipelined", step + 1, f"loss {loss:.3f}  largest difference {difference:.1e}")
    return Result(
        schedule=options.schedule,
        stages=options.stages,
        microbatches=options.microbatches,
        steps=options.steps,
        losses=meter.losses,
        loss_max_abs_diff=difference,
        tokens_per_second=meter.tokens_per_second(),
        bubble_measured=meter.bubble_measured(),
        bubble_predicted=meter.bubble_predicted(),
    )


def _train_pipelined(options: Options, text: str, bar: _Bar) -> Meter:
    meter = Meter(options.schedule, options.stages, options.microbatches, options.batch * options.context)
    bar.show("pipelined", 0, f"starting {options.stages} ranks")
    with tempfile.TemporaryDirectory(prefix="pypipe-demo-") as folder:
        scratch = Path(folder)
        (scratch / "text").write_text(text, encoding="utf-8", newline="")
        with Ranks(_rank, options.stages, (options, scratch), scratch) as ranks:
            for rank, report in ranks.reports():
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
    return meter


def _rank(rank: int, report: Callable[[StepReport], None], options: Options, scratch: Path) -> None:
    """What a rank's process runs. torch is imported in here, where a failure to do so is heard of."""
    from pypipe.demo_train import train_rank

    with (scratch / "text").open(encoding="utf-8", newline="") as file:
        text = file.read()
    train_rank(rank, report, options, text, scratch / "store")


class _Bar:
    """Two progress bars on stderr, one a training; nothing where stderr is no terminal."""

    def __init__(self, options: Options, wanted: bool) -> None:
        self._steps = options.steps
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description:11}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True),
            expand=True,
            disable=not (wanted and sys.stderr is not None and sys.stderr.isatty()),
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
        if training not in self._tasks:
            self._tasks[training] = self._progress.add_task(training, total=self._steps, figures=figures)
        self._progress.update(self._tasks[training], completed=step, figures=figures)
