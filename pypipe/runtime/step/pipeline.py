"""One rank's part of a running pipeline: from the ranks' meeting to the results of each step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import torch

from pypipe import _core
from pypipe.errors import ConfigurationError, InputError, PipelineError, PipelineTimeout
from pypipe.program import Channel, Kind, Program
from pypipe.runtime.batch.batch import Batch, ChunkSpecs
from pypipe.runtime.batch.merging import merge
from pypipe.runtime.data_parallel.wrappers import Wrapper, find_wrappers
from pypipe.runtime.diagnostics import failure
from pypipe.runtime.diagnostics.device_clock import clock_for
from pypipe.runtime.diagnostics.recorder import Recorder
from pypipe.runtime.diagnostics.trace import Trace
from pypipe.runtime.rendezvous import agreement
from pypipe.runtime.rendezvous.equal_parameters import describe_parameters
from pypipe.runtime.rendezvous.meeting import Card, refuse
from pypipe.runtime.rendezvous.state_names import NameClash, find_clash, sketch
from pypipe.runtime.rendezvous.world import World
from pypipe.runtime.step.executor import Executor
from pypipe.runtime.step.fitting import Fitted
from pypipe.runtime.step.model_copies import ModelCopies, copy_channels
from pypipe.runtime.step.refused import refused_module, refused_now
from pypipe.runtime.step.stage_execution import StageExecution
from pypipe.runtime.transport.channels import ReceiveChannel, SendChannel
from pypipe.runtime.transport.connection import Connection
from pypipe.runtime.transport.local import LocalChannel

__all__ = ["Call", "Pipeline", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What a pipeline is built of, on one rank.

    Args:
        world: the ranks.
        device: where this rank's stages live.
        pieces: which piece of the model each of this rank's modules is, and the module.
        fitted: what step() and eval() run, or why there is nothing to run.
        card: what else all ranks must have alike.
        n_microbatches: M.
        loss: the loss function, or None.
        scale_grads: whether gradients are those of the mean over the batch (else of the sum over microbatches).
        specs: how to cut batches and join outputs.
        timeout: seconds that any wait may take.
        checks: those of runtime/checks.py that are wanted.
        get_mesh: for each of the pieces, what gives it a mesh by the names of its dimensions, or None.
    """

    world: World
    device: torch.device
    pieces: Sequence[tuple[int, torch.nn.Module]]
    fitted: Fitted
    card: Card
    n_microbatches: int
    loss: Callable[..., Any] | None
    scale_grads: bool
    specs: ChunkSpecs
    timeout: float
    checks: frozenset[str] = frozenset()
    get_mesh: Sequence[Callable[..., Any] | None] = ()

    @property
    def program(self) -> Program | None:
        """What step() runs, with its transfers."""
        verified = self.fitted.training or self.fitted.forward_only
        return verified.program if verified else None

    @cached_property
    def where(self) -> str:
        """How messages call this rank's part."""
        stages = ", ".join(str(piece) for piece, _ in self.pieces)
        return f"rank {self.world.rank}, stage{'s' if len(self.pieces) > 1 else ''} {stages}"


class Call(NamedTuple):
    """What step() or eval() was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    losses: list[Any] | None
    return_outputs: bool
    loss_kwargs: dict[str, Any] | None
    training: bool
    name: str = "step()"


@dataclass
class _Running:
    """What there is once the ranks have met."""

    connection: Connection
    fitted: Fitted  # with what stages do together with their replicas
    stages: dict[int, StageExecution]  # by their number in the program
    wrapped: list[list[int]]  # which wrappers each of this rank's modules had
    copies: ModelCopies | None  # where there are two of the model
    executors: dict[bool, Executor] = field(default_factory=dict)  # by whether they train


class Pipeline:
    """Connects at its first call, then runs one batch a call."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: _Running | None = None
        self._failure: str | None = None
        self._calls = 0  # that have begun; as many on every rank
        self._turn = threading.Lock()
        self._closed = False
        self._trace: Trace | None = None
        self._n_traces = 0
        self.first_batch: str | None = None
        """What of the first batch was cut on this rank, along which dimension."""
        self._clash: NameClash | None = None
        self.busy_seconds = 0.0
        self.step_seconds = 0.0

    @property
    def program(self) -> Program | None:
        """What step() runs: once the ranks have met, with UNSHARD, RESHARD and REDUCE_GRAD of all their stages."""
        if self._running is None:
            return self._settings.program
        verified = self._running.fitted.training or self._running.fitted.forward_only
        return verified.program if verified else None

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
        running = self._ready()
        settings, executor, copies = self._settings, running.executors[call.training], running.copies
        started = False
        running.connection.recorder.core.step()
        self._calls += 1
        try:
            self._check(call)
            self._check_wrappers(running)
            if self._clash is not None:
                self._clash.warn(stacklevel=4)  # the line that calls step() or eval()
                self._clash = None
            batch = Batch(
                call.args,
                call.kwargs,
                call.target,
                settings.specs,
                settings.n_microbatches,
                first=self._holds_first,
                training=call.training,
            )
            if self.first_batch is None:
                self.first_batch = batch.describe()
            if copies is not None and call.training:
                copies.begin()
            for stage in running.stages.values():
                stage.begin(
                    batch,
                    training=call.training,
                    keep_results=call.return_outputs,
                    with_loss=settings.loss is not None and call.target is not None,
                    loss_kwargs=call.loss_kwargs,
                )
            started = True
            if call.training:
                self._execute(executor, running.connection)
                batch.finish()
            else:
                with torch.no_grad():
                    self._execute(executor, running.connection)
            for stage in running.stages.values():
                stage.end_step()
            result = self._results(running, call, batch.rows)
            if copies is not None and call.training:
                copies.finish()
            for sender in running.connection.senders.values():
                sender.finish()
        except BaseException as error:
            if copies is not None:
                copies.abandon()
            left = [text for stage in running.stages.values() for text in stage.abandon()] if started else []
            try:
                public = self._fail(error, call, running.connection, executor if started else None, left)
            except KeyboardInterrupt:  # while the end of another rank's step was being told
                raise KeyboardInterrupt from None
            try:
                if public is not error:
                    raise public from None
                if isinstance(error, KeyboardInterrupt) and failure.is_inside_pypipe(error):
                    raise error.with_traceback(None) from None  # one line a rank: where it waited says nothing
                raise
            finally:
                del public  # else its traceback, which has this frame, keeps slots until the garbage collector comes
        finally:
            for stage in running.stages.values():
                stage.reset()
        self.busy_seconds = sum(stage.busy_seconds for stage in running.stages.values())
        self.step_seconds = time.perf_counter() - start
        return result

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

    def _results(self, running: _Running, call: Call, rows: int) -> Any:
        if not self._holds_last:
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
        return merge([outputs[microbatch] for microbatch in sorted(outputs)], self._settings.specs.output)

    def _check(self, call: Call) -> None:
        where = self._settings.where
        if call.training and not torch.is_grad_enabled():
            raise InputError(f"{where}: step() needs gradients, but they are off here (torch.no_grad()): call eval()")
        if call.training and (problem := refused_now(module for _, module in self._settings.pieces)) is not None:
            raise InputError(f"{where}: {problem}")
        if call.losses is not None and not isinstance(call.losses, list):
            raise InputError(f"{where}: losses is a {type(call.losses).__name__}; give a list, it will be filled")
        if not self._holds_last:
            return
        if call.training and call.target is None:
            raise InputError(
                f"{where}: the last rank's step() needs target=, which loss_fn is called with; build the schedule "
                "without loss_fn to run forward only"
            )
        if call.losses is not None and call.target is None:
            raise InputError(f"{where}: losses= needs target= on the last rank")
        if call.losses is not None and self._settings.loss is None:
            raise InputError(f"{where}: losses= needs a schedule with a loss_fn")

    def _check_wrappers(self, running: _Running) -> None:
        found = [[wrapper.identity() for wrapper in find_wrappers(module)] for _, module in self._settings.pieces]
        if found != running.wrapped:
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
        if type(error) is PipelineTimeout:
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
            # A step adds to .grad as it goes: say so before somebody trains on half of a batch.
            public.add_note(
                f"pypipe: this step is not undone: on rank {rank} {added}; parameters are untouched. Call zero_grad() "
                "before you go on"
            )
        for text in left:
            public.add_note(f"pypipe: {text}")
        stage = action.stage if action is not None else settings.pieces[0][0]
        called = failure.Called(self._calls, call.name, call.training)
        failure.report(connection.hub, rank, action, public, where, stage, called)
        self._failure = failure.text_of(public)
        return public

    def _ready(self) -> _Running:
        """The connection and what runs on it, made at the first call."""
        where = self._settings.where
        if self._closed:
            raise PipelineError(f"{where}: this schedule is closed: build a new one, on every rank")
        if self._failure is not None:
            raise PipelineError(
                f"{where}: this schedule failed and cannot go on: build a new one, on every rank. It failed with "
                f"{self._failure}"
            )
        if self._running is None:
            try:
                self._running = self._connect()
            except Exception as error:
                self._failure = failure.text_of(error)
                raise
        else:
            self._raise_failure()
        return self._running

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

    def _connect(self) -> _Running:
        settings, program = self._settings, self._settings.program
        slots = self._slots()
        wrappers = self._find_wrappers()
        pieces = [piece for piece, _ in settings.pieces]
        card = {
            **settings.card,
            "stages": pieces,
            "n_microbatches": settings.n_microbatches,
            "program": program.digest() if program is not None else None,
            "loss_fn": settings.loss is not None,
            "scale_grads": settings.scale_grads,
            "check": sorted(settings.checks),
            "state_names": [sketch(module) for _, module in settings.pieces],
            "data_parallel": [[bool(found), any(each.shards for each in found)] for found in wrappers],
        }
        if program is not None and len(program.chains) > 1:
            card["copies"] = [describe_parameters(module) for _, module in settings.pieces]
        links = {channel: program.link_of(channel) for channel in slots} if program is not None else {}
        connection = Connection(
            settings.world,
            settings.device,
            links,
            slots,
            card,
            agreement.comparison(program, settings.fitted.misfit),
            settings.timeout,
            "checksum" in settings.checks,
        )
        assert program is not None  # the comparison has seen to it
        fitted = _with_stage_actions(settings.fitted, program, connection.cards)
        everywhere = [
            entry for card in connection.cards for entry in zip(card["stages"], card["state_names"], strict=True)
        ]
        self._clash = find_clash(settings.pieces, everywhere)
        training, forward_only = fitted.training, fitted.forward_only
        assert forward_only is not None
        rank = settings.world.rank
        held = agreement.held_stages(program, rank, pieces)
        local = _local_channels(program, rank)
        senders: dict[Channel, SendChannel | LocalChannel] = {**connection.senders, **local}
        receivers: dict[Channel, ReceiveChannel | LocalChannel] = {**connection.receivers, **local}
        stages = {}
        for stage, position in held.items():
            piece, module = settings.pieces[position]
            before, after = program.previous_stage(stage), program.next_stage(stage)
            stages[stage] = StageExecution(
                module,
                f"rank {rank}, stage {piece}",
                last=after is None,
                loss=settings.loss,
                scale_grads=settings.scale_grads,
                splits=any(action.kind is Kind.I and action.stage == stage for action in program.ranks[rank]),
                wrappers=wrappers[position],
                get_mesh=settings.get_mesh[position],
                receive_forward=None if before is None else receivers.get(Channel(Kind.F, before, stage)),
                send_forward=None if after is None else senders.get(Channel(Kind.F, stage, after)),
                receive_backward=None if after is None else receivers.get(Channel(Kind.B, after, stage)),
                send_backward=None if before is None else senders.get(Channel(Kind.B, stage, before)),
            )
            stages[stage].find_nan = "nan" in settings.checks
        self._holds_first = any(program.previous_stage(stage) is None for stage in held)
        self._holds_last = any(program.next_stage(stage) is None for stage in held)
        copies = None
        if len(program.chains) > 1:
            modules = {stage: settings.pieces[position][1] for stage, position in held.items()}
            copies = ModelCopies(program, rank, modules, connection.senders, connection.receivers)
        wrapped = [[wrapper.identity() for wrapper in found] for found in wrappers]
        running = _Running(connection, fitted, stages, wrapped, copies)
        running.executors[False] = Executor(forward_only.program, rank, stages, connection.recorder, connection.issue)
        if training is not None:
            running.executors[True] = Executor(training.program, rank, stages, connection.recorder, connection.issue)
        return running

    def _find_wrappers(self) -> list[list[Wrapper]]:
        """What wraps the parameters of each of this rank's modules.

        Raises:
            ConfigurationError: something that cannot be used in a stage.
        """
        settings = self._settings
        wrappers = [find_wrappers(module) for _, module in settings.pieces]
        identities = [wrapper.identity() for found in wrappers for wrapper in found]
        others = settings.world.others()
        for (piece, module), found in zip(settings.pieces, wrappers, strict=True):
            problem = refused_module(module, others)
            if problem is None:
                problem = next((problem for wrapper in found if (problem := wrapper.problem()) is not None), None)
            copied = settings.program is not None and len(settings.program.chains) > 1
            if copied and any(wrapper.shards for wrapper in found):
                problem = (
                    "fully_shard in a stage of a schedule that adds up the gradients of two copies of each parameter: "
                    "use DistributedDataParallel there, or ScheduleDualPipeV"
                )
            if any(identities.count(wrapper.identity()) > 1 for wrapper in found):
                problem = (
                    "one DistributedDataParallel or fully_shard is in two stages of this rank, so it cannot tell when "
                    "the gradients of one are complete: wrap the stages apart"
                )
            if problem is not None:
                text = f"rank {settings.world.rank}, stage {piece}: {problem}"
                refuse(settings.world, text)
                raise ConfigurationError(text)
        return wrappers

    def _slots(self) -> dict[Channel, int]:
        """For each channel of the program, how many slots it gets."""
        slots: dict[Channel, int] = {}
        for verified in (self._settings.fitted.forward_only, self._settings.fitted.training):
            if verified is None:
                continue
            for channel, count in verified.slots.items():
                # The verifier counts the messages that are in use at once. With one slot more, the next message
                # arrives while they are; without, its transfer would wait for a backward and then be waited for.
                # So 1F1B's forward channel from rank i has min(M, P - i) slots. (A gradient's slot may also be lost
                # to somebody who keeps the gradient: one more, however few there are.)
                microbatches = len(verified.program.microbatches_of(channel.target_stage))
                most = microbatches if channel.kind is Kind.F else count + 1
                slots[channel] = max(min(count + 1, most), slots.get(channel, 0))
        if self._settings.program is not None:
            slots.update(dict.fromkeys(copy_channels(self._settings.program), 2))
        return slots


def _with_stage_actions(fitted: Fitted, program: Program, cards: Sequence[Card]) -> Fitted:
    """The programs, with what the stages of all ranks do together with their replicas."""
    reduced: set[int] = set()
    sharded: set[int] = set()
    for rank, card in enumerate(cards):
        for stage, position in agreement.held_stages(program, rank, card["stages"]).items():
            reduces, shards = card["data_parallel"][position]
            if reduces:
                reduced.add(stage)
            if shards:
                sharded.add(stage)
    return fitted.with_stage_actions(reduced=reduced, sharded=sharded)


def _local_channels(program: Program, rank: int) -> dict[Channel, LocalChannel]:
    """The boundaries between two stages of this rank."""
    channels = {}
    for stage, holder in enumerate(program.placement):
        after = program.next_stage(stage)
        if holder == rank and after is not None and program.placement[after] == rank:
            channels[Channel(Kind.F, stage, after)] = LocalChannel()
            channels[Channel(Kind.B, after, stage)] = LocalChannel()
    return channels
