"""torch's schedules, each of which runs the pypipe schedule of its name, and their base classes."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from pypipe import schedules
from pypipe.base_schedule import Schedule
from pypipe.compat import tables
from pypipe.errors import ConfigurationError
from pypipe.program import Program
from pypipe.runtime.batch.merging import merge
from pypipe.runtime.rendezvous.exchange import refuse
from pypipe.stage import PipelineStage

__all__ = ["CLASSES", "PipelineScheduleMulti", "PipelineScheduleSingle", "get_schedule_class"]


class _PipelineSchedule:
    """The base of all of them: what torch's has, over a pypipe schedule that is made as soon as its program is known.

    Attributes:
        schedule: the pypipe schedule; None before `_load_csv()` or `_prepare_schedule_with_comms()`.
    """

    _pypipe_class: ClassVar[type[Schedule] | None] = None
    schedule: Schedule | None = None

    def _settle(self, arguments: dict[str, Any]) -> None:
        """Keeps the constructor's arguments, by pypipe's names, and makes the schedule if its class has a program."""
        given = arguments.pop("stage", None) or arguments.pop("stages", None)
        self._pipeline_stages: list[PipelineStage] = [given] if isinstance(given, PipelineStage) else given
        if not (isinstance(self._pipeline_stages, Sequence) and self._pipeline_stages):
            raise ConfigurationError(f"{type(self).__name__} takes this rank's stages, not {given!r}")
        self._n_microbatches: int = arguments.pop("n_microbatches")
        self._loss_fn: Callable[..., Any] | None = arguments.pop("loss_fn", None)
        self.scale_grads: bool = arguments.get("scale_grads", True)
        self._has_backward = self._loss_fn is not None
        self._arguments = arguments
        if self._pypipe_class is not None:
            self._build(self._pypipe_class, ())

    def _build(self, kind: Callable[..., Schedule], program: tuple[Program, ...]) -> None:
        self.schedule = kind(*program, self._pipeline_stages, self._n_microbatches, self._loss_fn, **self._arguments)

    def _run_program(self, program: Program) -> None:
        """Runs this program from now on."""
        if self.schedule is not None:
            self.schedule.close()
        arguments, self._arguments = (
            self._arguments,
            {
                name: value
                for name, value in self._arguments.items()
                if name not in ("backward_requires_autograd", "defer_pp_recv", "use_full_backward")
            },
        )
        try:
            self._build(Schedule, (program,))
        finally:
            self._arguments = arguments

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """The other ranks need not wait for one that has no program."""
        try:
            yield
        except (OSError, ValueError) as error:
            refuse(self._pipeline_stages[0].world, f"rank {self.rank}: {error}")
            raise

    @property
    def _num_stages(self) -> int:
        return self._pipeline_stages[0].num_stages

    @property
    def pp_group_size(self) -> int:
        """How many ranks the pipeline has."""
        return self._pipeline_stages[0].world.size

    @property
    def rank(self) -> int:
        """This rank, in the pipeline's group."""
        return self._pipeline_stages[0].world.rank

    @property
    def pipeline_order(self) -> dict[int, list[Any]]:
        """For each rank, its actions without transfers, as torch's `_Action`."""
        return tables.table_of(self.schedule.program.compute_only()) if self.schedule is not None else {}

    @property
    def pipeline_order_with_comms(self) -> dict[int, list[Any]]:
        """For each rank, its actions with transfers, as torch's `_Action`."""
        return tables.table_of(self.schedule.program) if self.schedule is not None else {}

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """On which rank each stage is."""
        if self.schedule is None:
            return {stage: stage % self.pp_group_size for stage in range(self._num_stages)}
        return tables.stage_to_rank(self.schedule.program)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Trains one batch as `pypipe.Schedule.step` does, whose arguments it takes.

        Returns:
            As torch's: the merged outputs, also of microbatches that came cut.
        """
        schedule = self._ready()
        return self._merged((schedule.step if self._has_backward else schedule.eval)(*args, **kwargs), kwargs)

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forwards only, as `pypipe.Schedule.eval` does, whose arguments it takes."""
        return self._merged(self._ready().eval(*args, **kwargs), kwargs)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Trains one batch that came cut, and returns nothing."""
        self.step(
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target_mbs=target_mbs,
            losses=losses,
            return_outputs=return_outputs,
            loss_kwargs=loss_kwargs,
        )

    def _merged(self, outputs: Any, given: dict[str, Any]) -> Any:
        """Of microbatches that came cut pypipe returns a list."""
        came_cut = any(given.get(name) is not None for name in ("arg_mbs", "kwarg_mbs", "target_mbs"))
        return merge(outputs, self._arguments.get("output_merge_spec")) if came_cut and outputs else outputs

    def _ready(self) -> Schedule:
        if self.schedule is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no program yet: call _load_csv() or _prepare_schedule_with_comms() first"
            )
        return self.schedule

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):  # program, trace, busy, close, counters, ...
            try:
                return getattr(vars(self)["schedule"], name)
            except (AttributeError, KeyError):
                pass
        raise AttributeError(
            f"{name!r}: pypipe.compat puts pypipe's {type(self).__name__} in the place of torch's, and it has no such "
            "attribute; see the page 'Migrating from torch.distributed.pipelining'"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.schedule!r}"


class PipelineScheduleSingle(_PipelineSchedule):
    """The base of the schedules of one stage per rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if self._pypipe_class is None:
            raise ConfigurationError(_own_loop(type(self), "GPipe or 1F1B"))
        self._settle(_bound(self._pypipe_class, args, kwargs))

    @property
    def _stage(self) -> PipelineStage:
        return self._pipeline_stages[0]


class PipelineScheduleMulti(_PipelineSchedule):
    """The base of the schedules of several stages per rank; by itself, one that runs a CSV file."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        **more: Any,
    ) -> None:
        self._settle(
            {
                "stages": stages,
                "n_microbatches": n_microbatches,
                "loss_fn": loss_fn,
                "args_chunk_spec": args_chunk_spec,
                "kwargs_chunk_spec": kwargs_chunk_spec,
                "output_merge_spec": output_merge_spec,
                "scale_grads": scale_grads,
                **more,
            }
        )

    @property
    def _stages(self) -> list[PipelineStage]:
        return self._pipeline_stages

    def _load_csv(self, filename: str | os.PathLike[str], format: str = "compute_only") -> None:
        """Runs the program of a CSV file from now on, with transfers of its own or pypipe's.

        Raises:
            ConfigurationError: the file and the format, the stages or the microbatches do not fit.
            ProgramError: a cell, or the file as a whole, is not a program.
        """
        with self._telling():
            self._run_program(tables.read(filename, format))

    def _dump_csv(self, filename: str | os.PathLike[str], format: str = "compute_only") -> None:
        program = self._ready().program
        tables.write(program if format == "compute_comms" else program.compute_only(), filename)

    def _validate_and_set_stage_mapping(self, actions: Mapping[int, Sequence[Any]]) -> None:
        """Does nothing: a program is verified when it is given."""


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """torch's runtime of any program, and the base of its schedules of several stages per rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("defer_pp_recv", None)
        super().__init__(*args, **kwargs)

    def _prepare_schedule_with_comms(self, actions: Mapping[int, Sequence[Any]], format: str = "compute_only") -> None:
        """Runs the program of this table from now on."""
        with self._telling():
            self._run_program(tables.program_of(actions, format))

    def _dump_csv(self, filename: str | os.PathLike[str], format: str = "compute_comms") -> None:
        super()._dump_csv(filename, format)

    def register_custom_function(self, computation_type: Any, custom_function: Any) -> NoReturn:
        """Refuses.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            f"register_custom_function({computation_type}): pypipe runs every action itself, in its own core; for "
            "graphs of your own (torchtitan's Graph PP) use torch's schedules: call pypipe.compat.uninstall() first"
        )


class _WithProgram(_PipelineScheduleRuntime):
    """The schedules of several stages per rank that torch has by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        assert self._pypipe_class is not None
        self._settle(_bound(self._pypipe_class, args, kwargs))


def _bound(pypipe_class: type[Schedule], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A constructor's arguments by name; pypipe's classes take torch's, in torch's order."""
    return dict(inspect.signature(pypipe_class).bind(*args, **kwargs).arguments)


def _own_loop(cls: type, known: str) -> str:
    return (
        f"{cls.__name__} is a base class without a program: use a schedule such as {known}. A class of your own with a "
        "loop of its own over torch's stages cannot run on pypipe's: give pypipe.Schedule a program instead"
    )


def _class(pypipe_class: type[Schedule], base: type[_PipelineSchedule]) -> type[_PipelineSchedule]:
    name = pypipe_class.__name__
    doc = f"torch's {name}, run by `pypipe.{name}`, whose arguments it takes."
    return type(
        name,
        (base,),
        {
            "_pypipe_class": pypipe_class,
            "__doc__": doc,
            "__module__": __name__,
            "__signature__": inspect.signature(pypipe_class),
        },
    )


_SINGLE = (schedules.ScheduleGPipe, schedules.Schedule1F1B, schedules.ScheduleZBH1, schedules.ScheduleZBH2)
_MULTI = (
    schedules.ScheduleInterleaved1F1B,
    schedules.ScheduleLoopedBFS,
    schedules.ScheduleInterleavedZeroBubble,
    schedules.ScheduleZBVZeroBubble,
    schedules.ScheduleDualPipeV,
    schedules.ScheduleVHalf,
    schedules.ScheduleVMin,
)
_BY_NAME = {each.__name__: _class(each, PipelineScheduleSingle) for each in _SINGLE}
_BY_NAME |= {each.__name__: _class(each, _WithProgram) for each in _MULTI}


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """torch's schedule for inference: GPipe's forwards."""

    _pypipe_class = schedules.ScheduleGPipe


CLASSES: dict[str, type] = _BY_NAME | {
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "_PipelineSchedule": _PipelineSchedule,
    "_PipelineScheduleRuntime": _PipelineScheduleRuntime,
    "_ScheduleForwardOnly": _ScheduleForwardOnly,
}
"""By torch's names."""
_KNOWN = {name.removeprefix("Schedule"): cls for name, cls in _BY_NAME.items()} | {
    name: CLASSES[name] for name in ("PipelineScheduleSingle", "PipelineScheduleMulti")
}


def get_schedule_class(schedule_name: str) -> type:
    """The class of a schedule's name, in any case: torch's names, and ZBH1, ZBH2, VHalf and VMin of pypipe's.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    by_lower = {name.lower(): name for name in _KNOWN}
    wanted = schedule_name.lower()
    if wanted not in by_lower:
        near = difflib.get_close_matches(wanted.removeprefix("schedule"), by_lower, n=1, cutoff=0.6)
        hint = f" Did you mean {by_lower[near[0]]!r}?" if near else ""
        raise ValueError(f"Unknown schedule name {schedule_name!r}. The valid options are {list(_KNOWN)}.{hint}")
    return _KNOWN[by_lower[wanted]]
