"""The schedule: the object whose step() trains one batch through the pipeline."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from pypipe.errors import ConfigurationError
from pypipe.program import Channel, Program
from pypipe.runtime.batch.batch import ChunkSpecs
from pypipe.runtime.diagnostics.checks import wanted
from pypipe.runtime.diagnostics.trace import Trace
from pypipe.runtime.environment import read
from pypipe.runtime.rendezvous.config import Config
from pypipe.runtime.rendezvous.exchange import refuse
from pypipe.runtime.rendezvous.world import World, find_world
from pypipe.runtime.step.fitting import Fitted, fit
from pypipe.runtime.step.pipeline import Pipeline
from pypipe.runtime.step.settings import Call, Settings
from pypipe.runtime.transport.links.communicators import communicators, max_ctas
from pypipe.runtime.transport.links.registry import CHOICES
from pypipe.stage import PipelineStage

__all__ = ["Schedule", "pipeline_of", "stages_of"]

# Read once: a package that is being reinstalled has none for a moment.
_VERSION = importlib.metadata.version("pypipe")


class Schedule:
    """Runs any program: a registered one, or one of your own.

    Args:
        program: the name of a registered builder ("1f1b", "zbv", ...), which is built for as many ranks and stages as
            there are; or a `pypipe.program.Program`, with or without transfers; or the path of a CSV file of one,
            which ends in .csv.
        stages: this rank's stages, in any order; or its only one.
        n_microbatches: M, how many microbatches a batch is cut into; any number from 1 up to the batch's length.
        loss_fn: called on the last stage as `loss_fn(output, target, **loss_kwargs)`; returns a tensor with one
            element. It may run its own backward (chunked cross entropy) and return a detached tensor: the gradient
            that it leaves on the output, by `output.backward(gradient)` or as `output.grad`, is weighted and goes on
            into the stage. None: step() runs forward only. Give it on every rank or on none.
        args_chunk_spec, kwargs_chunk_spec: how arguments are cut: TensorChunkSpec(dim) or Replicate(), nested as the
            arguments are (for a dataclass or a NamedTuple, a dict by field). Default: every tensor along dimension 0,
            also within containers, NamedTuples and dataclasses; a nested tensor by its components, a BlockMask by its
            rows; anything else to every microbatch (a list or a dict without tensors is the very object, which stages
            may fill; one with tensors is made anew for each microbatch). An array of numpy, and in a target a list or
            tuple too, that is as long as the batch is refused: make it a tensor. All tensors have one length, the
            batch's; only a tensor with a TensorChunkSpec for itself alone may have another: it is cut by itself, for
            example M rows into one for each microbatch. Any other object that holds tensors is refused,
            unless it has Replicate().
        output_merge_spec: how the last stage's outputs are joined: TensorChunkSpec(dim), Replicate() or Reduce(...),
            nested as the output is. Default: tensors along dimension 0, those without dimensions into a vector with one
            element for each microbatch. What is not a tensor must be the same in all microbatches.
        scale_grads: True: gradients are those of the mean over the whole batch, for a loss_fn that takes the mean over
            its microbatch, each microbatch weighted by its share of the rows. False: plain sums over microbatches.
        target_chunk_spec: how the target is cut, nested as it is. Default: along dimension 0; a flattened one, whose
            length is a multiple of the batch's, in proportion. Where arguments are cut along another dimension it is
            needed, unless the target has the batch's length along dimension 0 and no other that may be meant.
        loss_kwargs_chunk_spec: for step()'s loss_kwargs, by name: TensorChunkSpec(dim) cuts one as the target is cut,
            Replicate() gives every microbatch the whole, as all get that have no spec. One that is as long as the
            batch needs one of these.
        timeout: seconds (or a timedelta) that a rank waits for another one before it raises PipelineTimeout.
        check: "nan" looks through what every action makes and raises NonFiniteError at the first NaN or infinity;
            "checksum" sends checksums along and raises CorruptionError where a message changed on its way (not over
            NCCL). One of them or a list; they cost time.
        shapes: "dynamic": what a stage returns may have other shapes, dtypes and structure at any microbatch. "static":
            it is promised to be for each microbatch what it is in the first step(), and in the first eval() for those;
            what is not raises LayoutError on every rank. Over NCCL a rank's host then never waits for another rank.
        options: what else the builder takes, by its own names.

    Raises:
        ConfigurationError: an argument that cannot work. What the other ranks were given is compared when the first
            step() or eval() begins.
    """

    def __init__(
        self,
        program: Program | str | os.PathLike[str],
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
        check: str | Sequence[str] | None = None,
        shapes: str = "dynamic",
        **options: Any,
    ) -> None:
        given = _listed(stages)
        world, device, num_stages = given[0].world, given[0].device, given[0].num_stages
        seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
        try:
            _require_usable(given, n_microbatches, loss_fn, seconds)
            checks = wanted(check)
            if shapes not in ("dynamic", "static"):
                raise ValueError(f'shapes={shapes!r}: it takes "dynamic" or "static"')
            read("PYPIPE_LINK", CHOICES)
            of_ranks, ctas = communicators(), max_ctas()
            training = loss_fn is not None

            def refit(count: int) -> Fitted:
                return fit(program, world.size, num_stages, count, options, training=training)

            fitted = refit(n_microbatches)
        except ValueError as error:
            indices = ", ".join(str(stage.stage_index) for stage in given)
            where = f"rank {world.rank}, stage{'s' * (len(given) > 1)} {indices}"
            raise _refused(world, f"{where}: {error}") from None
        self._stages = given
        self._settings = Settings(
            world=world,
            device=device,
            pieces=[(stage.stage_index, stage.submod) for stage in given],
            fitted=fitted,
            refit=refit,
            config=Config(
                version=_VERSION,
                num_stages=num_stages,
                schedule=self._kind(program),
                communicators=of_ranks,
                max_ctas=ctas,
            ),
            n_microbatches=n_microbatches,
            loss=loss_fn,
            scale_grads=bool(scale_grads),
            specs=ChunkSpecs(
                args_chunk_spec,
                kwargs_chunk_spec,
                output_merge_spec,
                target_chunk_spec,
                loss_kwargs_chunk_spec,
                _argument_names(given),
            ),
            timeout=seconds,
            checks=checks,
            static=shapes == "static",
            renames=[stage.names.of if stage.names.is_given else None for stage in given],
            get_mesh=[stage.get_mesh for stage in given],
        )
        self._pipeline = Pipeline(self._settings)

    def _kind(self, program: Program | str | os.PathLike[str]) -> str:
        """What the ranks compare before they compare programs."""
        if type(self) is not Schedule:
            return type(self).__name__
        return f"Schedule({program.name if isinstance(program, Program) else os.path.basename(program)})"

    def __repr__(self) -> str:
        """Where it runs, how it cuts batches, and what it cut the first one along."""
        settings = self._settings
        cut = self._pipeline.first_batch
        return (
            f"{settings.config.schedule}({settings.where}, n_microbatches={settings.n_microbatches}"
            f"{settings.specs.describe()})" + (f", which cut {cut}" if cut else "")
        )

    @property
    def program(self) -> Program:
        """What step() runs, with its transfers; after the first step or eval, with what replicated stages add to it."""
        program = self._pipeline.program
        if program is None:
            raise ConfigurationError(f"{self._settings.where}: {self._settings.fitted.mismatch}")
        return program

    @property
    def counters(self) -> dict[Channel, dict[str, int]]:
        """For each channel of this rank, what it has counted: messages, bytes, layouts, allocations, slots, ..."""
        return self._pipeline.counters

    @property
    def busy_seconds(self) -> float:
        """Seconds that this rank spent in forwards and backwards during the last step() or eval()."""
        return self._pipeline.busy_seconds

    @property
    def step_seconds(self) -> float:
        """Seconds that the last step() or eval() took on this rank."""
        return self._pipeline.step_seconds

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        n_microbatches: int | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Trains one batch: forwards, losses and backwards of all microbatches. Gradients add up in `.grad`.

        Every rank calls it. The first stage takes `args`, which other ranks may pass as well (they are ignored there);
        each stage takes the keyword arguments that its own rank passes.

        Args:
            args: the first stage's positional arguments, for the whole batch.
            target: for loss_fn, for the whole batch; used on the rank of the last stage.
            losses: on the rank of the last stage, filled with the microbatches' losses, in order, unscaled and
                detached.
            return_outputs: whether the rank of the last stage keeps and returns the outputs.
            loss_kwargs: further keyword arguments of loss_fn, whole; weights of the batch's rows need a
                loss_kwargs_chunk_spec.
            n_microbatches: M of this call, where it is not the schedule's; on every rank the same. The first call with
                an M that takes more slots than there are connects the ranks anew.
            arg_mbs, kwarg_mbs, target_mbs: in the place of args, kwargs and target, a list of M microbatches: tuples
                of positional arguments, dicts of keyword arguments, targets. They may differ in length; each counts
                in the mean by its rows. A rank that gets none of them is told M by `n_microbatches`, unless it is the
                schedule's.
            kwargs: the keyword arguments of each of this rank's stages, for the whole batch.

        Returns:
            On the rank of the last stage the merged outputs, detached, or a list of them where this rank was given
            microbatches; elsewhere, or without return_outputs, None.

        After an error `.grad` holds what was there before and the gradients of the microbatches whose backward had
        ended on this rank: a note of the error says how many, and a backward that raises may leave a part of its own.
        Parameters are untouched. This schedule refuses to go on: call zero_grad() and build a new one, on every rank.
        A rank that had returned from the step by then raises the error in its next call, or in close(). What a stage
        or the loss function raises on this rank is raised as it is.

        Raises:
            ConfigurationError: the ranks were given arguments that differ (in the first call).
            InputError: the batch, the target or the loss cannot be used.
            LayoutError: a stage returned something that cannot be sent.
            RemoteStageError: another rank failed first.
            PeerLost: another rank died, ended, or closed its schedule.
            PipelineTimeout: another rank did not do its part within `timeout`.
            MismatchError: a message is not the one that this rank's program expects.
            NonFiniteError: with `check="nan"`, an action made a NaN or an infinity.
            CorruptionError: with `check="checksum"`, a message changed on its way.
        """
        training = self._settings.loss is not None
        more = (arg_mbs, kwarg_mbs, target_mbs, n_microbatches)
        return self._pipeline.run(
            Call(args, kwargs, target, losses, return_outputs, loss_kwargs, training, "step()", *more)
        )

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        n_microbatches: int | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs forwards only, without gradients and without touching any; losses too, where `target` is given.

        Arguments, result and errors are step()'s. Module.eval() is yours to call.

        A rank returns when its own part is done: the first one may be several batches ahead of the last one, and does
        not wait to hear how they end. So of an eval() that fails, or a step() without loss_fn, those ranks raise the
        error that are still in it; one that has returned raises it in its next call, or in close(), as soon as it is
        known there: "the last eval() failed on rank 2 after this rank had returned from it". What is to be done only
        when all ranks have succeeded needs a barrier of your own before it.
        """
        more = (arg_mbs, kwarg_mbs, target_mbs, n_microbatches)
        return self._pipeline.run(
            Call(args, kwargs, target, losses, return_outputs, loss_kwargs, False, "eval()", *more)
        )

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        parameters: Iterable[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Clips the gradients of all stages by the norm of all of them, as `torch.nn.utils.clip_grad_norm_` does it.

        Every rank calls it after the same step(), also one whose stages have no parameters. What counts: the parameters
        of every stage, and of a loss_fn that is an nn.Module, each once, however many replicas or copies there are; of
        a DTensor (`fully_shard`, tensor parallelism) the whole of it.

        Args:
            max_norm: what the norm is to be at most.
            norm_type: p of the p-norm, above 0; math.inf: the largest absolute value.
            error_if_nonfinite: whether a norm that is NaN or infinite is an error, on every rank.
            foreach: whether torch's faster functions are used. None: where they can be.
            parameters: further ones of this rank alone, such as those that a loss function closes over.

        Returns:
            The norm before clipping: a tensor without dimensions on this rank's device, with the same bits on every
            rank; in the gradients' dtype, or in the wider one where stages have different ones.

        Raises:
            NonFiniteError: the norm is not finite, and `error_if_nonfinite`; gradients are untouched.
            InputError: there has been no step, `norm_type` is not a norm's, or a gradient is sparse.
            MismatchError: the ranks make different calls.
            PipelineTimeout: a rank did not make this call within `timeout`.
            PeerLost: a rank has ended, or closed its schedule.
        """
        return self._pipeline.clip_grad_norm_(
            max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach, others=list(parameters)
        )

    @contextlib.contextmanager
    def busy(self, work: str) -> Iterator[None]:
        """Says that this rank is alive and works: ranks that wait for it meanwhile wait beyond their timeout.

        `with schedule.busy("writing a checkpoint"): ...`, around anything that may take longer than `timeout`: between
        steps, or inside a stage. It does not help a rank whose process has stopped or died.

        Args:
            work: what for, in a few words; other ranks' errors show it.
        """
        recorder = self._pipeline.recorder
        if recorder is None:  # no rank waits yet
            yield
            return
        recorder.core.set_busy(work or "busy")
        try:
            yield
        finally:
            recorder.core.set_busy("")

    def trace(self) -> Trace:
        """Records what every rank does, and when, in the steps within a `with` block.

        Every rank enters the block, around the same steps::

            with schedule.trace() as trace:
                schedule.step(x, target=y)
            if rank == 0:
                print(trace.text())
                trace.save("step.html")

        On a CPU it costs less than a microsecond an action within the block, and nothing outside; on an accelerator,
        three events an action.

        Raises:
            PipelineError: a trace is being taken already.
        """
        return self._pipeline.trace()

    def close(self) -> None:
        """Leaves the pipeline. Idempotent; also done when the schedule is collected and when Python exits.

        Raises:
            PipelineError: another rank failed in a call that this rank had returned from, and no call has raised it
                yet. The schedule is closed all the same. (Not raised where a `with` block ends by another error, nor
                when the schedule is collected.)
        """
        self._pipeline.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        self._pipeline.close(error)


def stages_of(schedule: Schedule) -> Sequence[PipelineStage]:
    """What a schedule was built from on this rank."""
    return schedule._stages


def pipeline_of(schedule: Schedule) -> Pipeline:
    """What runs a schedule on this rank."""
    return schedule._pipeline


def _listed(stages: Any) -> list[PipelineStage]:
    given = [stages] if isinstance(stages, PipelineStage) else list(stages) if isinstance(stages, Sequence) else None
    right = [stage for stage in given or [] if isinstance(stage, PipelineStage)]
    if given and len(right) == len(given):
        return right
    what = f"a {type(stages).__name__}"
    if given is not None:
        wrong = [type(stage).__name__ for stage in given if not isinstance(stage, PipelineStage)]
        what = f"a list with a {wrong[0]}" if wrong else "an empty list"
    world = right[0].world if right else find_world()
    raise _refused(world, f"rank {world.rank}: a schedule takes this rank's PipelineStage objects, not {what}")


def _argument_names(given: Sequence[PipelineStage]) -> tuple[str, ...]:
    """What the model's first stage calls its positional arguments, where this rank has it."""
    for stage in given:
        if stage.stage_index == 0:
            try:
                parameters = inspect.signature(stage.submod.forward).parameters.values()
            except (TypeError, ValueError):  # not written in Python
                return ()
            kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
    return ()


def _refused(world: World, problem: str) -> ConfigurationError:
    """Tells the other ranks, and returns this rank's error."""
    refuse(world, problem)
    return ConfigurationError(problem)


def _require_usable(given: Sequence[PipelineStage], count: Any, loss: Any, seconds: float) -> None:
    """Raises ValueError, with what is wrong with the arguments."""
    for what, values in (
        ("groups", [stage.world.name for stage in given]),
        ("num_stages", [stage.num_stages for stage in given]),
        ("devices", [str(stage.device) for stage in given]),
    ):
        if len(set(values)) > 1:
            raise ValueError(
                f"the stages of this rank have different {what} ({', '.join(map(str, values))}): give them the same"
            )
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"n_microbatches is {count!r}; a batch is cut into 1 microbatch or more")
    if loss is not None and not callable(loss):
        raise ValueError(f"loss_fn is a {type(loss).__name__}; give a function loss_fn(output, target)")
    if not seconds > 0:
        raise ValueError(f"timeout is {seconds:g} s; give a positive number of seconds")
