"""The schedules of the field, each a class of its own; names and arguments are those of torch.distributed.pipelining.

What they run is in pypipe.program, as data. `Schedule` runs any program.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from pypipe.schedule import Schedule
from pypipe.stage import PipelineStage

__all__ = ["Schedule", "Schedule1F1B", "ScheduleGPipe"]


class _Single(Schedule):
    """What the schedules of one stage per rank take."""

    _name: str

    def __init__(
        self,
        stage: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        timeout: float | datetime.timedelta = 600.0,
    ) -> None:
        super().__init__(
            self._name,
            stage,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            timeout=timeout,
        )


class ScheduleGPipe(_Single):
    """All forwards, then all backwards in reverse order (GPipe, arXiv 1811.06965, section 2.3).

    A rank keeps the activations of all M microbatches; the bubble is (P - 1) / (M + P - 1) of a step.
    """

    _name = "gpipe"


class Schedule1F1B(_Single):
    """One forward, one backward, in turn, after a warm-up (PipeDream-Flush; Megatron-LM, arXiv 2104.04473, 2.2.1).

    Rank i keeps the activations of min(M, P - i) microbatches; the bubble is (P - 1) / (M + P - 1) of a step.
    """

    _name = "1f1b"
