"""One rank's part of a running pipeline: from its first call to the results of each step."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch

from pypipe import _core
from pypipe.errors import ConfigurationError, InputError, PipelineError, PipelineTimeout
from pypipe.program import Channel, Program
from pypipe.runtime.batch.batch import Batch
from pypipe.runtime.batch.merging import merge
from pypipe.runtime.batch.split_batch import SplitBatch
from pypipe.runtime.data_parallel.wrappers import find_wrappers
from pypipe.runtime.diagnostics import failure
from pypipe.runtime.diagnostics.device_clock import clock_for
from pypipe.runtime.diagnostics.recorder import Recorder
from pypipe.runtime.diagnostics.trace import Trace
from pypipe.runtime.rendezvous.exchange import refuse
from pypipe.runtime.rendezvous.world import World
from pypipe.runtime.step import between_steps, gradient_norm, resizing
from pypipe.runtime.step.assembly import Running, assemble, identities
from pypipe.runtime.step.executor import Executor
from pypipe.runtime.step.fitting import Fitted
from pypipe.runtime.step.refused import refused_now
from pypipe.runtime.step.settings import Call, Settings
from pypipe.runtime.transport.connection import Connection

__all__ = ["Pipeline", "Scaler"]


class Scaler(Protocol):
    """What knows by how much losses are scaled."""

    def get_scale(self) -> float:
        """The scale, in the current step."""


class Pipeline:
    """Connects at its first call, then runs one batch a call."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: Running | None = None
        self._n_microbatches = settings.n_microbatches  # of the current call
        self._failure: str | None = None
        self._calls = 0  # that have begun; as many on every rank
        self._turn = threading.Lock()
        self._closed = False
        self._trace: Trace | None = None
        self._n_traces = 0
        self.first_batch: str | None = None
        """What of the first batch was cut on this rank, along which dimension."""
        self._has_begun = False  # the current step's actions
        self.busy_seconds = 0.0
        self.step_seconds = 0.0
        self._scaler: weakref.ref[Scaler] | None = None

    @property
    def world(self) -> World:
        """The ranks."""
        return self._settings.world

    @property
    def timeout(self) -> float:
        """Seconds that any wait may take."""
        return self._settings.timeout

    @property
    def device(self) -> torch.device:
        """Where this rank's stages live."""
        return self._settings.device

    def scale_by(self, scaler: Scaler) -> None:
        """From now on, losses are multiplied by a scaler's scale, for as long as it lives.

        Raises:
            ConfigurationError: they are by another one's.
        """
        if self._scaler is not None and self._scaler() is not None:
            raise ConfigurationError(
                f"{self._settings.where}: this schedule has a GradScaler already, which scales its gradients: use that "
                "one; load_state_dict() takes over another one's state"
            )
        self._scaler = weakref.ref(scaler)

    @property
    def program(self) -> Program | None:
        """What the last call ran; once the ranks have met, with what stages do together with their replicas."""
        if self._running is None:
            return self._settings.program
        return self._running.program_of(self._n_microbatches)

    @property
    def counters(self) -> dict[Channel, dict[str, int]]:
        """For each channel between this rank and another, what it has counted."""
        if self._running is None:
            return {}
        connection = self._running.connection
        counted = {channel: end.counters for channel, end in connection.senders.items()}
        return counted | {channel: end.counters for channel, end in connection.receivers.items()}

    @property
    def recorder(self) -> Recorder | None:
        """What this rank notes of its actions, once it is connected."""
        return self._running.connection.recorder if self._running is not None else None

    def trace(self) -> Trace:
        """A trace, which begins with its `with` block."""
        return Trace(self._settings.world, self._settings.timeout, self._begin_trace, self._raise_failure)

    def _begin_trace(self, trace: Trace | None) -> int:
        """Begins a trace, or ends the one that is being taken; returns its number."""
        if self._trace is not None and trace is not None:
            raise PipelineError(f"{self._settings.where}: a trace is being taken already; end its `with` block first")
        self._trace = trace
        self._n_traces += trace is not None
        return self._n_traces

    def gather(self, what: str, values: Callable[[], list[float | str]]) -> list[list[float | str]]:
        """Every rank's values, by rank, between two steps.

        Args:
            what: the call, as the user knows it; the other ranks' must be the same.
            values: returns this rank's, as JSON values; what it raises is told to the other ranks.

        Raises:
            PipelineError: another rank failed, left, makes another call or none; or this schedule has run no step.
        """
        where = f"{self._settings.where}: {what}"
        if not self._turn.acquire(blocking=False):
            raise PipelineError(f"{where} is called inside step() or eval(): call it after that, on every rank")
        try:
            if self._running is None and self._failure is None and not self._closed:
                raise InputError(f"{where} comes before the first step(), so the ranks have not met: call it after one")
            running = self._ready()
            try:
                return between_steps.gather(
                    what,
                    values(),
                    settings=self._settings,
                    connection=running.connection,
                    gatherer=running.gatherer,
                    calls=self._calls,
                    raise_failure=self._raise_failure,
                )
            except Exception as error:
                if self._failure is None:
                    self._failure = failure.text_of(error)
                    between_steps.report(error, what, running.connection, self._settings.world.rank)
                raise
        finally:
            self._turn.release()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float,
        *,
        error_if_nonfinite: bool,
        foreach: bool | None,
        others: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Clips the gradients of all stages by one norm; see `gradient_norm.clip`.

        Args:
            others: parameters of this rank that are in none of its stages.
        """
        parameters, counted = list(others), list(others)
        if (running := self._running) is not None and self.program is not None:
            rank = self._settings.world.rank
            parameters, counted = gradient_norm.listed(self.program, rank, running.modules, running.ties, others)
        return gradient_norm.clip(
            parameters,
            counted,
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            foreach=foreach,
            gather=self.gather,
            device=self._settings.device,
        )

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the pipeline. Idempotent.

        Args:
            error: what this rank leaves for, of which the others are told.

        Raises:
            PipelineError: without `error`: a call failed on another rank after this rank had returned from it, and no
                later call has said so.
        """
        self._closed = True
        running, self._running = self._running, None
        if running is not None:
            if error is not None:
                running.connection.tell(error)
            running.connection.close()
            cause = running.connection.hub.cause()
            if error is None and self._failure is None and cause and failure.is_late(cause, self._calls):
                self._raise(cause, "at close()")

    def run(self, call: Call) -> Any:
        """Runs one batch; returns the merged outputs where this rank has them."""
        if not self._turn.acquire(blocking=False):
            raise PipelineError(
                f"{self._settings.where}: step() or eval() of this schedule is already running: it cannot be called "
                "inside it or in another thread meanwhile; build a second schedule for what runs within the first"
            )
        try:
            return self._run(call)
        finally:
            self._turn.release()

    def _run(self, call: Call) -> Any:
        start = time.perf_counter()
        problem = self._count(call)
        running = self._ready()
        running.connection.recorder.core.step()
        self._calls += 1
        self._has_begun = False
        try:
            if problem is not None:
                raise problem
            result = self._step(call, running)
        except BaseException as error:
            public = self._public(error, call, running)
            try:
                if public is not error:
                    raise public from None
                if isinstance(error, KeyboardInterrupt) and failure.is_inside_pypipe(error):
                    raise error.with_traceback(None) from None  # one line a rank: where it waited is of no use
                raise
            finally:
                del public  # else its traceback, which includes this frame, keeps slots until garbage is collected
        finally:
            for stage in running.stages.values():
                stage.reset()
        self.busy_seconds = sum(stage.busy_seconds for stage in running.stages.values())
        self.step_seconds = time.perf_counter() - start
        return result

    def _step(self, call: Call, running: Running) -> Any:
        """Runs the step itself; what it raises has yet to be turned into what the caller sees."""
        settings, copies = self._settings, running.copies if call.training else None
        self._check(call, running)
        if running.clash is not None:
            running.clash.warn(stacklevel=5)  # the line that calls step() or eval()
            running.clash = None
        batch = self._batch(call, running)
        if self.first_batch is None:
            self.first_batch = batch.describe()
        ties = running.ties if call.training else None
        if ties is not None:
            ties.begin()
        if copies is not None:
            copies.begin()
        scaler = self._scaler() if self._scaler is not None else None
        for stage in running.stages.values():
            stage.begin(
                batch,
                2 * self._n_microbatches + (not call.training),
                loss_scale=functools.cache(scaler.get_scale) if scaler is not None else None,
                keep_results=call.return_outputs,
                with_loss=settings.loss is not None and call.has_target,
            )
        self._has_begun = True
        with contextlib.nullcontext() if call.training else torch.no_grad():
            self._execute(running.executors[self._n_microbatches, call.training], running.connection)
        if call.training:
            batch.finish()
        for stage in running.stages.values():
            stage.end_step()
        result = self._results(running, call, batch.rows)
        if copies is not None:
            copies.finish()
        if ties is not None:
            ties.finish()
        for sender in running.connection.senders.values():
            sender.finish()
        return result

    def _batch(self, call: Call, running: Running) -> Batch:
        """What the call has given, to be had by microbatch."""
        count, specs = self._n_microbatches, self._settings.specs
        options: Any = {
            "first": running.holds_first,
            "training": call.training,
            "two_copies": running.copies is not None,
            "loss_kwargs": call.loss_kwargs,
        }
        if call.is_split:
            return SplitBatch(*call.mbs, specs, count, **options)
        return Batch(call.args, call.kwargs, call.target, specs, count, **options)

    def _public(self, error: BaseException, call: Call, running: Running) -> BaseException:
        """Ends a step that failed, on every rank; returns what the caller is to see."""
        if running.copies is not None:
            running.copies.abandon()
        if running.ties is not None:
            running.ties.abandon()
        left = [text for stage in running.stages.values() for text in stage.abandon()] if self._has_begun else []
        every = running.executors[self._n_microbatches, call.training]
        executor = every if self._has_begun else None
        try:
            public = self._fail(error, call, running.connection, executor, left)
        except KeyboardInterrupt:  # while the end of another rank's step was being told
            raise KeyboardInterrupt from None
        if isinstance(error, Exception):  # else the process is about to end
            reason = failure.text_of(public).partition("\n")[0][:300]
            try:
                every.take_part(reason, training=call.training, has_begun=self._has_begun)
            except Exception as broken:
                public.add_note(f"pypipe: the other replicas may wait for this one, since their group fails: {broken}")
        return public

    def _execute(self, executor: Executor, connection: Connection) -> None:
        if self._trace is None:
            executor.run()
            return
        clock = clock_for(self._settings.device)
        connection.recorder.start_trace(len(executor.actions))
        executor.run(clock)
        done = connection.recorder.stop_trace()
        if clock is None:
            times = {one.action: (one.ready or one.start, one.end) for one in done}
        else:
            times = clock.times(executor.actions)
        self._trace.add(f"{connection.prefix}/trace/{self._trace.number}", executor.program, times)

    def _results(self, running: Running, call: Call, rows: int) -> Any:
        if not running.holds_last:
            return None
        losses: dict[int, Any] = {}
        outputs: dict[int, Any] = {}
        for stage in running.stages.values():
            losses |= stage.losses
            outputs |= stage.results
        if running.copies is not None:
            running.copies.share_results(losses, outputs, rows)
        if call.losses is not None:
            call.losses[:] = [losses[microbatch] for microbatch in sorted(losses)]
        if not call.return_outputs:
            return None
        in_order = [outputs[microbatch] for microbatch in sorted(outputs)]
        return in_order if call.is_split else merge(in_order, self._settings.specs.output)

    def _check(self, call: Call, running: Running) -> None:
        self._check_wrappers(running)
        where = self._settings.where
        if self._settings.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InputError(
                f"{where}: {call.name} is called while a CUDA graph is captured: a step waits for other ranks, which a "
                "graph cannot; capture what a stage does (torch.cuda.make_graphed_callables) before the first step"
            )
        if call.training and not torch.is_grad_enabled():
            raise InputError(f"{where}: step() needs gradients, but they are off here (torch.no_grad()): call eval()")
        if call.training and (problem := refused_now(module for _, module in self._settings.pieces)) is not None:
            raise InputError(f"{where}: {problem}")
        if call.losses is not None and not isinstance(call.losses, list):
            raise InputError(f"{where}: losses is a {type(call.losses).__name__}; give a list, it will be filled")
        if not running.holds_last:
            return
        if call.training and not call.has_target:
            who = "the last rank's" if running.copies is None else "of two model copies, both ends'"
            raise InputError(
                f"{where}: {who} step() needs target=, which loss_fn is called with; build the schedule "
                "without loss_fn to run forward only"
            )
        if call.losses is not None and not call.has_target:
            raise InputError(f"{where}: losses= needs target= on the last rank")
        if call.losses is not None and self._settings.loss is None:
            raise InputError(f"{where}: losses= needs a schedule with a loss_fn")

    def _check_wrappers(self, running: Running) -> None:
        if identities([find_wrappers(module) for _, module in self._settings.pieces]) != running.wrapped:
            raise InputError(
                f"{self._settings.where}: what wraps a stage's parameters for data parallelism (DDP, fully_shard) has "
                "changed since the first step or eval: wrap stages before it, or build a new schedule, on every rank"
            )

    def _fail(
        self,
        error: BaseException,
        call: Call,
        connection: Connection,
        executor: Executor | None,
        left: Sequence[str],
    ) -> BaseException:
        """Tells every rank, refuses further steps, and returns the public error in place of the core's.

        Args:
            left: what has become of gradients that replicas were to share.
        """
        settings, rank = self._settings, self._settings.world.rank
        size, program, returned = settings.world.size, settings.program, self._calls - 1
        action = executor.action if executor is not None else None
        where = failure.describe_action(action) if executor is not None else "the start of the step"
        public: BaseException = error
        resized = resizing.find(settings.world, connection.prefix, self._calls, self._n_microbatches)
        if resized is not None and isinstance(error, _core.CoreError):
            public = ConfigurationError(f"{settings.where}: {resized}")
            refuse(settings.world, str(public))  # those who have found the other number wait there
        elif type(error) is PipelineTimeout:
            doing = f"rank {rank}, at {where}"
            public = failure.timed_out(doing, f"{error}.", connection.hub, rank, size, program, returned)
        elif isinstance(error, _core.CoreError):
            public = failure.convert(
                error, connection.hub, rank, action, settings.timeout, where, size, program, returned
            )
        else:
            error.add_note(f"pypipe: on {settings.where}, at {where}")
            earlier = connection.hub.cause()
            if earlier is not None:
                first = failure.from_cause(earlier, f"rank {rank}", program, returned)
                error.add_note(f"pypipe: it is not the first: {first}")
        added = executor.added if executor is not None else None
        if added is not None:
            # A step adds to .grad as it goes: say so before the caller trains on half of a batch.
            public.add_note(
                f"pypipe: on rank {rank} .grad holds part of this step: {added}. Parameters are untouched. Call "
                "zero_grad() before you go on"
            )
        for text in left:
            public.add_note(f"pypipe: {text}")
        stage = action.stage if action is not None else settings.pieces[0][0]
        called = failure.Called(self._calls, call.name, call.training)
        failure.report(connection.hub, rank, action, public, where, stage, called)
        self._failure = failure.text_of(public)
        return public

    def _count(self, call: Call) -> InputError | None:
        """Notes how many microbatches a call has; returns what is wrong with them, to be raised on every rank."""
        try:
            self._n_microbatches = call.count(self._settings.n_microbatches)
        except InputError as error:
            self._n_microbatches = self._settings.n_microbatches
            return InputError(f"{self._settings.where}: {error}")
        return None

    def _ready(self) -> Running:
        """The connection and what runs on it, made at the first call."""
        where = self._settings.where
        if self._closed:
            raise PipelineError(f"{where}: this schedule is closed: build a new one, on every rank")
        if self._failure is not None:
            raise PipelineError(
                f"{where}: this schedule failed and cannot go on: build a new one, on every rank. It failed with "
                f"{self._failure}"
            )
        if self._running is not None:
            self._raise_failure()
        if self._running is None or not self._serves(self._running):
            try:
                self._running = self._assembled()
            except Exception as error:
                self._failure = failure.text_of(error)
                raise
        return self._running

    def _serves(self, running: Running) -> bool:
        """Whether there is what runs this call's number of microbatches, or can be without further slots."""
        count = self._n_microbatches
        return count in running.fitted or running.add(count, self._fitted(count))

    def _fitted(self, n_microbatches: int) -> Fitted:
        settings = self._settings
        if n_microbatches == settings.n_microbatches:
            return settings.fitted
        try:
            return settings.refit(n_microbatches)
        except ValueError as error:
            text = f"{settings.where}: with n_microbatches={n_microbatches}: {error}"
            if self._running is not None:
                resizing.announce(settings.world, self._running.connection.prefix, self._calls + 1, n_microbatches)
                self._running.connection.close()
                self._running = None
            refuse(settings.world, text)
            raise ConfigurationError(text) from None

    def _assembled(self) -> Running:
        """The ranks meet, for the first time or with more slots than before."""
        settings, count = self._settings, self._n_microbatches
        counts = {settings.n_microbatches, count}
        if self._running is not None:
            counts |= self._running.fitted.keys()
        fitted = {each: self._fitted(each) for each in sorted(counts)}
        running, self._running = self._running, None
        if running is not None:
            resizing.announce(settings.world, running.connection.prefix, self._calls + 1, count)
            running.connection.close()
        return assemble(settings, count, fitted)

    def _raise_failure(self) -> None:
        """Raises what has gone wrong on any rank since the last step."""
        cause = self._running.connection.hub.cause() if self._running is not None else None
        if cause is not None:
            self._raise(cause, "between steps")

    def _raise(self, cause: _core.Cause, when: str) -> NoReturn:
        error = failure.from_cause(cause, f"{self._settings.where}, {when}", self._settings.program, self._calls)
        self._failure = failure.text_of(error)
        try:
            raise error
        finally:
            del error
