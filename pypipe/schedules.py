"""Schedules: the object whose step() trains one batch through the pipeline."""

from __future__ import annotations

import datetime
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pypipe import _core
from pypipe.errors import ConfigurationError, InputError, PipelineError, PipelineTimeout
from pypipe.program import Channel, Kind, Program, Verified, build, lower, verify
from pypipe.runtime import failure
from pypipe.runtime.batch import Batch, ChunkSpecs
from pypipe.runtime.connection import Connection
from pypipe.runtime.execution import StageExecution
from pypipe.runtime.executor import Executor
from pypipe.runtime.microbatches import merge
from pypipe.runtime.rendezvous import Card, refuse
from pypipe.stage import PipelineStage

__all__ = ["Schedule1F1B", "ScheduleGPipe"]


# Read once: a package that is being reinstalled has none for a moment.
_VERSION = importlib.metadata.version("pypipe")


class _Schedule:
    """What every schedule of one stage per rank is; a subclass names its program.

    Args:
        stage: this rank's stage.
        n_microbatches: M, how many microbatches a batch is cut into; any number from 1 up to the batch's length.
        loss_fn: called on the last stage as loss_fn(output, target, **loss_kwargs); returns a tensor with one element.
            None: step() runs forward only. Give it on every rank or on none.
        args_chunk_spec, kwargs_chunk_spec: how arguments are cut: TensorChunkSpec(dim) or Replicate(), nested as the
            arguments are. Default: every tensor along dimension 0, anything else to every microbatch.
        output_merge_spec: how the last stage's outputs are joined: TensorChunkSpec(dim), Replicate() or Reduce(...),
            nested as the output is. Default: tensors along dimension 0.
        scale_grads: True: gradients are those of the mean over the whole batch, for a loss_fn that takes the mean over
            its microbatch, each microbatch weighted by its share of the rows. False: plain sums over microbatches.
        timeout: seconds (or a timedelta) that a rank waits for another one before it raises PipelineTimeout.

    Raises:
        ConfigurationError: an argument that cannot work.
    """

    _program_name: str

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        timeout: float | datetime.timedelta = 600.0,
    ) -> None:
        self._stage = stage
        self._rank = stage.world.rank
        self._n_microbatches = n_microbatches
        self._loss = loss_fn
        self._specs = ChunkSpecs(args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        self._scale_grads = bool(scale_grads)
        self._timeout = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
        problem = self._problem()
        if problem:
            refuse(stage.world, problem)
            raise ConfigurationError(problem)
        program = build(self._program_name, stage.num_stages, n_microbatches)
        self._forward_only = verify(lower(program.forward_only()))
        self._training = verify(lower(program)) if loss_fn is not None else None
        self._connection: Connection | None = None
        self._executors: dict[bool, Executor] = {}
        self._execution: StageExecution | None = None
        self._failure: str | None = None
        self._running = False
        self._closed = False
        self.busy_seconds = 0.0
        """Seconds that this rank spent in forwards and backwards during the last step() or eval()."""
        self.step_seconds = 0.0
        """Seconds that the last step() or eval() took on this rank."""

    def _problem(self) -> str | None:
        where = f"rank {self._rank}, stage {self._stage.stage_index}"
        count = self._n_microbatches
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            return f"{where}: n_microbatches is {count!r}; a batch is cut into 1 microbatch or more"
        if self._loss is not None and not callable(self._loss):
            return f"{where}: loss_fn is a {type(self._loss).__name__}; give a function loss_fn(output, target)"
        if not self._timeout > 0:
            return f"{where}: timeout is {self._timeout:g} s; give a positive number of seconds"
        return None

    @property
    def program(self) -> Program:
        """What step() runs, with its transfers."""
        return (self._training or self._forward_only).program

    @property
    def counters(self) -> dict[Channel, dict[str, int]]:
        """For each channel of this rank, what it has counted: messages, bytes, layouts, allocations, slots, ..."""
        if self._connection is None:
            return {}
        counted = {channel: end.counters for channel, end in self._connection.senders.items()}
        return counted | {channel: end.counters for channel, end in self._connection.receivers.items()}

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Trains one batch: forwards, losses and backwards of all microbatches. Gradients add up in `.grad`.

        Every rank calls it. The first stage takes `args`, which other ranks may pass as well (they are ignored there);
        each stage takes the keyword arguments that its own rank passes.

        Args:
            args: the first stage's positional arguments, for the whole batch.
            target: for loss_fn, for the whole batch; used on the last rank.
            losses: on the last rank, filled with the microbatches' losses, in order, unscaled and detached.
            return_outputs: whether the last rank keeps and returns the outputs.
            loss_kwargs: further keyword arguments of loss_fn.
            kwargs: the stage's keyword arguments, for the whole batch.

        Returns:
            On the last rank the merged outputs, detached; elsewhere, or without return_outputs, None.

        Raises:
            InputError: the batch does not fit; RemoteStageError, PeerLost, PipelineTimeout: another rank failed, died
                or did not come; or whatever a stage or the loss function raised on this rank.
        """
        if self._training is None:
            return self._run(args, kwargs, target, losses, return_outputs, loss_kwargs, training=False)
        return self._run(args, kwargs, target, losses, return_outputs, loss_kwargs, training=True)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs forwards only, without gradients and without touching any; losses too, where `target` is given.

        Arguments, result and errors are step()'s. Module.eval() is yours to call.
        """
        return self._run(args, kwargs, target, losses, return_outputs, loss_kwargs, training=False)

    def close(self) -> None:
        """Leaves the pipeline. Idempotent; also done when the schedule is collected and when Python exits."""
        self._closed = True
        self._executors, self._execution = {}, None
        if self._connection is not None:
            self._connection.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        *,
        training: bool,
    ) -> Any:
        start = time.perf_counter()
        connection = self._ready()
        execution, executor = self._execution, self._executors[training]
        assert execution is not None
        started = False
        self._running = True
        try:
            self._check_call(target, losses, training)
            batch = Batch(
                args,
                kwargs,
                target,
                self._specs,
                self._n_microbatches,
                first=self._stage.is_first,
                training=training,
            )
            execution.begin(
                batch,
                training=training,
                keep_results=return_outputs,
                with_loss=self._loss is not None and target is not None,
                loss_kwargs=loss_kwargs,
            )
            started = True
            if training:
                executor.run()
            else:
                with torch.no_grad():
                    executor.run()
            execution.finish()
            result = self._results(execution, losses, return_outputs)
        except BaseException as error:
            self._fail(error, connection, executor if started else None)
            raise
        finally:
            self._running = False
            execution.reset()
        self.busy_seconds = execution.busy_seconds
        self.step_seconds = time.perf_counter() - start
        return result

    def _results(self, execution: StageExecution, losses: list[Any] | None, return_outputs: bool) -> Any:
        if not self._stage.is_last:
            return None
        order = range(self._n_microbatches)
        if losses is not None:
            losses[:] = [execution.losses[microbatch] for microbatch in order if microbatch in execution.losses]
        if not return_outputs:
            return None
        return merge([execution.results[microbatch] for microbatch in order], self._specs.output)

    def _check_call(self, target: Any, losses: list[Any] | None, training: bool) -> None:
        where = f"rank {self._rank}, stage {self._stage.stage_index}"
        if training and not torch.is_grad_enabled():
            raise InputError(f"{where}: step() needs gradients, but they are off here (torch.no_grad()): call eval()")
        if losses is not None and not isinstance(losses, list):
            raise InputError(f"{where}: losses is a {type(losses).__name__}; give a list, it will be filled")
        if not self._stage.is_last:
            return
        if training and target is None:
            raise InputError(
                f"{where}: the last rank's step() needs target=, which loss_fn is called with; build the schedule "
                "without loss_fn to run forward only"
            )
        if losses is not None and target is None:
            raise InputError(f"{where}: losses= needs target= on the last rank")
        if losses is not None and self._loss is None:
            raise InputError(f"{where}: losses= needs a schedule with a loss_fn")

    def _fail(self, error: BaseException, connection: Connection, executor: Executor | None) -> None:
        """Tells every rank, refuses further steps, and raises the public error in place of the core's."""
        action = executor.action if executor is not None else None
        public: BaseException = error
        if type(error) is PipelineTimeout:
            public = PipelineTimeout(f"rank {self._rank}, at {failure.describe_action(action)}: {error}")
        elif isinstance(error, _core.CoreError):
            public = failure.convert(error, connection.hub, self._rank, action, self._timeout)
        else:
            doing = failure.describe_action(action) if executor is not None else "the start of the step"
            error.add_note(f"pypipe: on rank {self._rank}, stage {self._stage.stage_index}, at {doing}")
        stage = action.stage if action is not None else self._stage.stage_index
        failure.report(connection.hub, self._rank, action, public, stage=stage)
        self._failure = failure.text_of(public)
        if public is not error:
            raise public from None

    def _ready(self) -> Connection:
        """The connection, made at the first call."""
        where = f"rank {self._rank}, stage {self._stage.stage_index}"
        if self._running:
            raise PipelineError(
                f"{where}: step() or eval() of this schedule is already running, and cannot be called inside it; "
                "build a second schedule for what runs within the first"
            )
        if self._closed:
            raise PipelineError(f"{where}: this schedule is closed: build a new one, on every rank")
        if self._failure is not None:
            raise PipelineError(
                f"{where}: this schedule failed and cannot go on: build a new one, on every rank. It failed with "
                f"{self._failure}"
            )
        if self._connection is None:
            try:
                self._connection = self._connect()
            except Exception as error:
                self._failure = failure.text_of(error)
                raise
        else:
            cause = self._connection.hub.cause()
            if cause is not None:
                earlier = failure.from_cause(cause, f"{where}, between steps")
                self._failure = failure.text_of(earlier)
                raise earlier
        return self._connection

    def _connect(self) -> Connection:
        programs = [self._forward_only] + ([self._training] if self._training else [])
        slots: dict[Channel, int] = {}
        for verified in programs:
            for channel, count in verified.slots.items():
                # The verifier counts the messages that are in use at once. With one slot more, the next message
                # arrives while they are; without, its transfer would wait for a backward and then be waited for.
                # So 1F1B's forward channel from rank i has min(M, P - i) slots. (A gradient's slot may also be lost
                # to somebody who keeps the gradient: one more, however few there are.)
                most = self._n_microbatches if channel.kind is Kind.F else count + 1
                slots[channel] = max(min(count + 1, most), slots.get(channel, 0))
        stage = self._stage
        links = {channel: self.program.link_of(channel) for channel in slots}
        connection = Connection(stage.world, stage.device, links, slots, self._card(), self._compare, self._timeout)
        self._execution = StageExecution(
            stage.submod,
            f"rank {self._rank}, stage {stage.stage_index}",
            last=stage.is_last,
            loss=self._loss,
            scale_grads=self._scale_grads,
            receive_forward=connection.receivers.get(Channel(Kind.F, stage.stage_index - 1, stage.stage_index)),
            send_forward=connection.senders.get(Channel(Kind.F, stage.stage_index, stage.stage_index + 1)),
            receive_backward=connection.receivers.get(Channel(Kind.B, stage.stage_index + 1, stage.stage_index)),
            send_backward=connection.senders.get(Channel(Kind.B, stage.stage_index, stage.stage_index - 1)),
        )
        stages = {stage.stage_index: self._execution}

        def executor(verified: Verified) -> Executor:
            return Executor(verified.program, self._rank, stages)

        self._executors[False] = executor(self._forward_only)
        if self._training is not None:
            self._executors[True] = executor(self._training)
        return connection

    def _card(self) -> Card:
        """What the ranks compare before they connect."""
        return {
            "version": _VERSION,
            "stage": self._stage.stage_index,
            "num_stages": self._stage.num_stages,
            "n_microbatches": self._n_microbatches,
            "schedule": type(self).__name__,
            "program": self.program.digest(),
            "loss_fn": self._loss is not None,
            "scale_grads": self._scale_grads,
        }

    @staticmethod
    def _compare(cards: Sequence[Card]) -> None:
        """Raises the same error on every rank, unless the ranks built parts of one pipeline."""
        remedies = {
            "version": "install the same version of pypipe on every rank",
            "num_stages": "give every PipelineStage the same num_stages",
            "schedule": "use the same schedule class on every rank",
            "n_microbatches": "give every rank's schedule the same n_microbatches",
            "loss_fn": "give loss_fn on every rank, or on none (it is only called on the last)",
            "scale_grads": "give every rank's schedule the same scale_grads",
        }
        for key, remedy in remedies.items():
            values = [card[key] for card in cards]
            if any(value != values[0] for value in values):
                listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise ConfigurationError(f"the ranks disagree about {key} ({listed}): {remedy}")
        count = cards[0]["num_stages"]
        if count != len(cards):
            raise ConfigurationError(
                f"num_stages is {count}, but the pipeline's group has {len(cards)} ranks: this schedule runs one stage "
                "on each rank; give PipelineStage a group of as many ranks as there are stages"
            )
        stages = [card["stage"] for card in cards]
        for rank, stage in enumerate(stages):
            if stages.count(stage) > 1:
                twice = " and ".join(str(r) for r, s in enumerate(stages) if s == stage)
                raise ConfigurationError(
                    f"stage_index {stage} is given more than once, on ranks {twice}: every stage is built on one rank "
                    "(usually stage_index=rank)"
                )
            if stage != rank:
                raise ConfigurationError(
                    f"rank {rank} holds stage {stage}: this schedule places stage i on rank i of the group; give "
                    "PipelineStage stage_index=rank, or a group in the order of the stages"
                )


class ScheduleGPipe(_Schedule):
    """All forwards, then all backwards in reverse order (GPipe, arXiv 1811.06965, section 2.3).

    A rank keeps the activations of all M microbatches; the bubble is (P - 1) / (M + P - 1) of a step.
    """

    _program_name = "gpipe"


class Schedule1F1B(_Schedule):
    """One forward, one backward, in turn, after a warm-up (PipeDream-Flush; Megatron-LM, arXiv 2104.04473, 2.2.1).

    Rank i keeps the activations of min(M, P - i) microbatches; the bubble is (P - 1) / (M + P - 1) of a step.
    """

    _program_name = "1f1b"


for _class in (ScheduleGPipe, Schedule1F1B):
    _class.__doc__ = f"{_class.__doc__}\n{(_Schedule.__doc__ or '').split(chr(10), 1)[1]}"
