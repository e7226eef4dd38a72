"""The schedules of the field, each a class of its own; names and arguments are those of torch.distributed.pipelining.

What they run is in pypipe.program, as data, and what is said here of bubbles holds for equal times of all stages.
T_F, T_B, T_W: a rank's share of one microbatch's forward, input-gradient and weight-gradient. `Schedule` runs any
program.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from pypipe.base_schedule import Schedule
from pypipe.stage import PipelineStage

__all__: list[str] = [
    "Schedule",
    "Schedule1F1B",
    "ScheduleAuto",
    "ScheduleDualPipe",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBVZeroBubble",
]


class _Single(Schedule):
    """What the schedules of one stage per rank take: that stage, or a list of it; the rest as `Schedule` does."""

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
        target_chunk_spec: Any = None,
        loss_kwargs_chunk_spec: Any = None,
        timeout: float | datetime.timedelta = 600.0,
        check: str | Sequence[str] | None = None,
        shapes: str = "dynamic",
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        more: dict[str, Any] = {
            "target_chunk_spec": target_chunk_spec,
            "loss_kwargs_chunk_spec": loss_kwargs_chunk_spec,
            "timeout": timeout,
            "check": check,
            "shapes": shapes,
        }
        super().__init__(self._name, stage, n_microbatches, loss_fn, *specs, scale_grads, **more)


class _Multi(Schedule):
    """What the schedules of several stages per rank take: a list of these; the rest as `Schedule` does.

    `backward_requires_autograd` and `defer_pp_recv` are taken for compatibility with torch.distributed.pipelining and
    not needed: receives never hold up what comes before them.
    """

    _name: str

    def __init__(
        self,
        stages: Sequence[PipelineStage] | PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        target_chunk_spec: Any = None,
        loss_kwargs_chunk_spec: Any = None,
        timeout: float | datetime.timedelta = 600.0,
        check: str | Sequence[str] | None = None,
        shapes: str = "dynamic",
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        more: dict[str, Any] = {
            "target_chunk_spec": target_chunk_spec,
            "loss_kwargs_chunk_spec": loss_kwargs_chunk_spec,
            "timeout": timeout,
            "check": check,
            "shapes": shapes,
        }
        super().__init__(self._name, stages, n_microbatches, loss_fn, *specs, scale_grads, **more)


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


class ScheduleZBH1(_Single):
    """1F1B whose backwards are split, weight gradients where 1F1B has its bubbles (arXiv 2401.10241, section 2.2).

    As much memory as 1F1B; the bubble is (P - 1)(T_F + T_B - T_W).
    """

    _name = "zb_h1"


class ScheduleZBH2(_Single):
    """As ZB-H1, with more forwards ahead of the first backward (arXiv 2401.10241, section 2.2).

    Up to 2P - 1 microbatches' activations on a rank; the bubble is (P - 1)(T_F + T_B - 2 T_W).
    """

    _name = "zb_h2"


class ScheduleInterleaved1F1B(_Multi):
    """1F1B of v stages on each rank: stage s on rank s mod P (Megatron-LM, arXiv 2104.04473, section 2.2.2).

    Takes any M. The bubble is 1F1B's divided by v.
    """

    _name = "interleaved"


class ScheduleInterleavedZeroBubble(_Multi):
    """Interleaved 1F1B whose backwards are split; stage s on rank s mod P (arXiv 2401.10241)."""

    _name = "interleaved_zb"


class ScheduleLoopedBFS(_Multi):
    """All microbatches through a stage before the rank's next stage (arXiv 2211.05953); stage s on rank s mod P.

    A rank keeps the activations of all M microbatches; the bubble is that of interleaved 1F1B.
    """

    _name = "looped_bfs"

    # torch's takes no chunk specs, so that positions mean something else.
    def __init__(
        self,
        stages: Sequence[PipelineStage] | PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        target_chunk_spec: Any = None,
        loss_kwargs_chunk_spec: Any = None,
        timeout: float | datetime.timedelta = 600.0,
        check: str | Sequence[str] | None = None,
        shapes: str = "dynamic",
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        more: dict[str, Any] = {
            "target_chunk_spec": target_chunk_spec,
            "loss_kwargs_chunk_spec": loss_kwargs_chunk_spec,
            "timeout": timeout,
            "check": check,
            "shapes": shapes,
        }
        super().__init__(stages, n_microbatches, loss_fn, *specs, scale_grads, **more)


class ScheduleZBVZeroBubble(_Multi):
    """ZB-V: two stages on each rank, in a V: rank r holds the stages r and 2P - 1 - r (arXiv 2401.10241, section 6).

    As much memory as 1F1B, and no bubble where T_F = T_B = T_W.
    """

    _name = "zbv"


class ScheduleVHalf(_Multi):
    """V-Half: ZB-V's placement with about half of 1F1B's activations (arXiv 2405.15362)."""

    _name = "v_half"


class ScheduleVMin(_Multi):
    """V-Min: ZB-V's placement with about a third of 1F1B's activations (arXiv 2405.15362)."""

    _name = "v_min"


class ScheduleDualPipeV(_Multi):
    """DualPipe cut in half: two stages on each rank, in a V: rank r holds the stages r and 2P - 1 - r.

    A forward of one arm of the V stands beside a backward of the other, so that transfers hide behind compute
    (DeepSeek-V3, arXiv 2412.19437, section 3.2.1; github.com/deepseek-ai/DualPipe).
    """

    _name = "dualpipev"


class ScheduleDualPipe(_Multi):
    """DualPipe: microbatches pass the ranks in both directions, through two copies of the model (arXiv 2412.19437).

    Rank r of P is given two stages: `PipelineStage(module, r, P)`, then `PipelineStage(module, P - 1 - r, P)`, the
    second copy's. Both copies of a stage begin with the same parameters, and the same optimizer keeps them the same: at
    the end of step() their gradients of this step are added up, and each copy's `.grad` gets the sum.

    Every rank passes the whole batch, or the first and the last rank do: the first half of the microbatches enters at
    rank 0, the second at rank P - 1, and `target` is used at both. Both get the losses and the outputs of the whole
    batch, in order; with return_outputs=False no outputs go from one to the other. Buffers (batch norm's statistics)
    are each copy's own.
    """

    _name = "dualpipe"


class ScheduleAuto(Schedule):
    """The best program that a search finds for given times and memory (the idea is of arXiv 2401.10241, section 3.1).

    With two stages on each rank, rank r holds the stages r and 2P - 1 - r, else stage s is on rank s mod P;
    `placement` says otherwise. The times are the same on every rank, in any unit: `forward`, `input_backward`,
    `weight_backward`, `hop` and more, of all stages or of each; `memory` limits the activations that a rank keeps. See
    `pypipe.program.auto`, which takes them all; `pypipe plan` compares what it finds with the other schedules.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage] | PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        target_chunk_spec: Any = None,
        loss_kwargs_chunk_spec: Any = None,
        timeout: float | datetime.timedelta = 600.0,
        **times: Any,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        given = stages if isinstance(stages, Sequence) else [stages]
        if "placement" not in times and given and isinstance(given[0], PipelineStage):
            ranks = range(given[0].world.size)
            if given[0].num_stages == 2 * len(ranks):
                times["placement"] = [*ranks, *reversed(ranks)]
        times |= {"target_chunk_spec": target_chunk_spec, "timeout": timeout}
        times |= {"loss_kwargs_chunk_spec": loss_kwargs_chunk_spec}
        super().__init__("auto", stages, n_microbatches, loss_fn, *specs, scale_grads, **times)


def _complete_docstrings() -> None:
    """Each class shows the arguments, whose text `Schedule` has."""
    if not Schedule.__doc__:  # python -OO
        return
    text = inspect.cleandoc(Schedule.__doc__)
    arguments = text[text.index("    stages:") : text.index("    options:")]
    raises = text[text.index("Raises:") :]
    for name in __all__:
        schedule = globals()[name]
        if schedule is not Schedule:
            schedule.__doc__ = f"{inspect.cleandoc(schedule.__doc__)}\n\nArgs:\n{arguments}\n{raises}"


_complete_docstrings()
