"""What the ranks report of each step, and the demo's figures made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pypipe.program import Kind, Program, simulate

# The first steps allocate, negotiate layouts and warm caches up.
WARM_UP = 3


@dataclass(frozen=True)
class StepReport:
    """One rank's account of one step; times are wall-clock seconds.

    Args:
        loss: the mean over the whole batch; None on all ranks but that of the last stage.
        seconds: the whole step: batch, schedule.step() and optimizer.
        step_seconds: schedule.step() alone.
        busy_seconds: of those, inside forwards and backwards.
        forward_seconds: of those, inside F actions.
    """

    loss: float | None
    seconds: float
    step_seconds: float
    busy_seconds: float
    forward_seconds: float


@dataclass(frozen=True)
class TraceReport:
    """The last step of all ranks, measured and predicted, as `pypipe.program.drawing.chrome_trace` writes it."""

    text: str


class Meter:
    """Puts the ranks' reports together, step by step.

    Args:
        program: what the ranks run.
        tokens: characters a step.
    """

    def __init__(self, program: Program, tokens: int) -> None:
        self._program = program
        self._tokens = tokens
        self._reports: list[list[StepReport]] = [[] for _ in range(program.n_ranks)]
        self.losses: list[float] = []

    def add(self, rank: int, report: StepReport) -> None:
        """Takes a rank's next report; a rank's reports come in the order of its steps."""
        self._reports[rank].append(report)
        if report.loss is not None:
            self.losses.append(report.loss)

    @property
    def steps(self) -> int:
        """The number of steps that every rank has reported."""
        return min(len(reports) for reports in self._reports)

    def tokens_per_second(self, last: int | None = None) -> float:
        """Characters trained on per wall-clock second, over the `last` steps or all after the warm-up."""
        return self._tokens / fmean(max(each.seconds for each in step) for step in self._window(last))

    def bubble_measured(self, last: int | None = None) -> float:
        """The ranks' mean idle share of schedule.step(), its median over the `last` steps or all."""
        return median(
            1 - fmean(each.busy_seconds for each in step) / max(each.step_seconds for each in step)
            for step in self._window(last)
        )

    def bubble_predicted(self, last: int | None = None) -> float:
        """The simulated program's idle share, where each rank's actions take the time that they took here.

        A rank's stages are taken to be equal, and so are the halves of a split backward. With equal ranks this is
        (P-1)/(M+P-1), for GPipe (arXiv 1811.06965, section 2.3) and 1F1B alike.
        """
        ranks = list(zip(*self._window(last), strict=True))
        placement, programs = self._program.placement, self._program.ranks
        counts = [sum(action.kind is Kind.F for action in actions) for actions in programs]
        forward = [median(each.forward_seconds for each in rank) / n for rank, n in zip(ranks, counts, strict=True)]
        busy = [median(each.busy_seconds for each in rank) / n for rank, n in zip(ranks, counts, strict=True)]
        half = [(busy[rank] - forward[rank]) / 2 for rank in placement]
        return simulate(
            self._program,
            forward=[forward[rank] for rank in placement],
            input_backward=half,
            weight_backward=half,
            backward=[2 * each for each in half],
        ).bubble_ratio

    def _window(self, last: int | None) -> list[Sequence[StepReport]]:
        """The complete steps, each as its reports by rank; no warm-up unless there is nothing else."""
        first = min(WARM_UP, self.steps - 1)
        if last is not None:
            first = max(first, self.steps - last)
        return [[reports[step] for reports in self._reports] for step in range(first, self.steps)]
