"""One stage's part of a step: forward, backward, and what is kept between them.

Memory is given back as early as the computation allows. After a forward, only the autograd nodes of its outputs are
kept, not the outputs. After a backward, the leases of what was received end. A gradient that is sent on at once goes
first, since another rank waits for it, unless the send might block: it may be waiting for the very slots of these
leases, so then they end first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pypipe.errors import InputError
from pypipe.program import Kind
from pypipe.runtime.autograd.deferred_hooks import DeferredHooks
from pypipe.runtime.autograd.engine import gradient_edge, run_backward
from pypipe.runtime.autograd.split import SplitBackward
from pypipe.runtime.batch.batch import Batch, ChunkSpecs, Share
from pypipe.runtime.batch.merging import require_alike, require_mergeable
from pypipe.runtime.data_parallel.wrappers import Wrapper
from pypipe.runtime.diagnostics.checks import require_finite
from pypipe.runtime.step.current import Current, set_current
from pypipe.runtime.step.losses import Losses
from pypipe.runtime.step.microbatch_state import MicrobatchState, detached, owned
from pypipe.runtime.step.new_gradients import NewGradients
from pypipe.runtime.transport.channel import ReceiveChannel, SendChannel
from pypipe.runtime.transport.distributed_tensors import Meshes
from pypipe.runtime.transport.lease import CopiesLease, Lease
from pypipe.runtime.transport.local import LocalChannel

__all__ = ["StageExecution"]

Loss = Callable[..., Any]

# Between steps.
_NOTHING = Batch((), {}, None, ChunkSpecs(), 1, first=False, training=False)


class Added(NamedTuple):
    """What a step has added to a stage's `.grad` so far.

    Attributes:
        whole: backwards.
        early: backwards of which I has added some gradients, and W is to add the others.
        unsure: whether a backward was broken off that may have added some.
    """

    whole: int
    early: int
    unsure: bool


class StageExecution:
    """Runs the actions of one stage.

    Args:
        module: the stage's module.
        where: the stage's name in error messages.
        loss: on the last stage, the loss function, or None.
        scale_grads: whether gradients are those of the mean over the batch (else of the sum over microbatches).
        two_copies: whether another copy of the stage has a part of the microbatches.
        splits: whether backwards are split into I and W.
        wrappers: what shards the module's parameters or reduces their gradients among replicas.
        get_mesh: gives a mesh by the names of its dimensions, for DTensors that the stage before sends.
        receive_forward, send_forward, receive_backward, send_backward: the channels to the neighbouring stages, on
            other ranks or on this one; None where this stage is the first or the last.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        where: str,
        *,
        last: bool,
        loss: Loss | None,
        scale_grads: bool,
        splits: bool,
        two_copies: bool = False,
        wrappers: Sequence[Wrapper] = (),
        get_mesh: Callable[..., Any] | None = None,
        receive_forward: ReceiveChannel | LocalChannel | None,
        send_forward: SendChannel | LocalChannel | None,
        receive_backward: ReceiveChannel | LocalChannel | None,
        send_backward: SendChannel | LocalChannel | None,
    ) -> None:
        self._module = module
        self._where = where
        self._last = last
        self._losses: Losses | None = None
        if last and loss is not None:
            self._losses = Losses(loss, module, where, weighs=scale_grads, two_copies=two_copies)
        self._scale_grads = scale_grads
        self._two_copies = two_copies
        self._receive_forward = receive_forward
        self._inputs = receive_forward.inputs() if receive_forward is not None else None
        if receive_forward is not None:
            receive_forward.meshes = Meshes(module, where, get_mesh)
        self._send_forward = send_forward
        self._receive_backward = receive_backward
        self._gradients = receive_backward.gradients(splits=splits) if receive_backward is not None else None
        self._send_backward = send_backward
        # Stages of one rank hand over in memory, as part of F and B: programs have no action for it.
        self._hands_forward = isinstance(send_forward, LocalChannel)
        self._hands_backward = isinstance(send_backward, LocalChannel)
        self._wrappers = wrappers
        self._moves_gradients = any(wrapper.moves_gradients for wrapper in wrappers)
        self._new_gradients = NewGradients(module, moves=self._moves_gradients)
        self._deferred_hooks = DeferredHooks()
        self._split = SplitBackward(where)
        self.busy_seconds = 0.0
        self.on_ready: Callable[[], None] = _nothing
        """Called when an action has the message that it waited for."""
        self.find_nan = False
        """Whether everything that comes out of an action is looked through for NaN and infinity."""
        self.reset()

    def reset(self) -> None:
        """Forgets everything about a step, even a failed one."""
        set_current(None)
        self._count = 0  # of microbatches
        self._replicas_began = False
        for wrapper in self._wrappers:
            wrapper.end()
        self._deferred_hooks.give_back()
        for channel in (self._send_forward, self._send_backward):
            if isinstance(channel, LocalChannel):
                channel.reset()
        self._microbatches: dict[int, MicrobatchState] = {}
        if self._losses is not None:
            self._losses.reset()
        self._new_gradients.end()
        self._added = 0  # backwards of which all gradients are in `.grad`
        self._adding: bool | None = False  # now; None: in I, where it depends on the graph
        self._batch: Batch = _NOTHING
        self._loss_scale: Callable[[], float] | None = None
        self.losses: dict[int, Tensor] = {}
        self.results: dict[int, Any] = {}

    def begin(
        self,
        batch: Batch,
        run: int,
        *,
        keep_results: bool,
        with_loss: bool,
        loss_scale: Callable[[], float] | None = None,
    ) -> None:
        """Starts a step.

        Args:
            batch: the rank's, so every stage of a rank gets its keyword arguments.
            run: 2 M, and 1 more in eval().
            keep_results: whether the last stage's outputs are wanted.
            with_loss: whether the last stage computes losses.
            loss_scale: by how much gradients are scaled, in the whole step.
        """
        training = run % 2 == 0
        self.reset()
        self._count = run // 2
        self._loss_scale = loss_scale
        self._batch = batch
        self._training = training
        self._keep_results = keep_results and self._last
        self._with_loss = with_loss and self._last
        if training:
            self._deferred_hooks.begin(self._module)
        self.begin_replicas(training=training)
        self.busy_seconds = 0.0
        channels = [self._receive_forward, self._send_forward]
        channels += [self._receive_backward, self._send_backward] if training else []
        for channel in channels:
            if isinstance(channel, (ReceiveChannel, SendChannel)):
                channel.begin(run)
        if training and (self._receive_forward is not None or self._gradients is not None):
            self._new_gradients.begin(batch.leaves)

    def begin_replicas(self, *, training: bool) -> None:
        """Has the wrappers begin a step, unless they have."""
        if not self._replicas_began:
            self._replicas_began = True
            for wrapper in self._wrappers:
                wrapper.begin(training=training)

    def unshard(self, _: int) -> None:
        """UNSHARD: gathers the stage's sharded parameters."""
        for wrapper in self._wrappers:
            wrapper.unshard()

    def reduce_gradients(self, _: int) -> None:
        """REDUCE_GRAD: reduces the gradients of all microbatches among the stage's replicas."""
        for wrapper in self._wrappers:
            wrapper.reduce()

    def reshard(self, _: int) -> None:
        """RESHARD: frees what UNSHARD has gathered."""
        for wrapper in self._wrappers:
            wrapper.reshard()

    def take_part(self, kind: Kind, reason: str) -> None:
        """In place of an action, after a step that failed: does what the stage's replicas wait for.

        Args:
            kind: the action's.
            reason: why the step has failed, in one line.
        """
        for wrapper in self._wrappers:
            match kind:
                case Kind.F:
                    wrapper.forward_failed()
                case Kind.UNSHARD:
                    wrapper.unshard()
                case Kind.REDUCE_GRAD:
                    wrapper.reduce_failed(reason)
                case Kind.RESHARD:
                    wrapper.reshard()

    def abandon(self) -> list[str]:
        """After a step that failed; returns what has become of gradients that replicas were to share, in words."""
        said = [said for wrapper in self._wrappers if (said := wrapper.abandon()) is not None]
        return [f"{self._where}: {text}" for text in dict.fromkeys(said)]

    @property
    def added(self) -> Added:
        """What this step has added to `.grad`."""
        early = sum(each.weight_work.early for each in self._microbatches.values() if each.weight_work is not None)
        return Added(self._added, early, self._split.adds if self._adding is None else self._adding)

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a `.grad` of this step. That of a sharded one is dropped where a step fails."""
        return not self._moves_gradients and any(parameter.grad is not None for parameter in self._module.parameters())

    def receiver(self, kind: Kind) -> ReceiveChannel:
        """The channel that messages of Kind.F or Kind.B come through from another rank."""
        channel = self._receive_forward if kind is Kind.F else self._receive_backward
        assert isinstance(channel, ReceiveChannel)
        return channel

    def forward(self, microbatch: int) -> None:
        """F: waits for the input, runs the module, and on the last stage the loss."""
        batch = self._batch
        received: Lease | None = None
        if self._inputs is None:
            share = batch.share(microbatch)
            args = batch.args(microbatch)
        else:
            self._new_gradients.look()
            received = self._inputs.take(microbatch, training=self._training)
            self.on_ready()
            share = Share(received.rows, received.batch_rows)
            tree = received.tree
            args = tuple(tree) if isinstance(tree, (tuple, list)) else (tree,)
            received.tree = tree = None
        weight = partial(self._weight, microbatch, share)
        now = Current(microbatch, self._count, share.rows if share.batch_rows else None, weight)
        kept = self._microbatches[microbatch] = MicrobatchState(share, received, now)
        start = time.perf_counter()
        kwargs = batch.kwargs(microbatch, share)
        set_current(kept.current)
        try:
            output = self._module(*args, **kwargs)
        except TypeError as error:
            if self._inputs is None and not args and "missing" in str(error):
                raise self._without_input(error) from error
            raise
        del args
        if received is not None and (changed := received.changed_shared()) is not None:
            raise InputError(
                f"{self._where}, forward, microbatch {microbatch}: tensor {changed} of the input was changed in place, "
                "but the stage before returned it beside another view of the same memory, which changes along without "
                "a pipeline and not with one. clone() it before you change it, or return the tensor only once and make "
                "its views here"
            )
        if self.find_nan:
            require_finite(output, f"{self._where}, forward, microbatch {microbatch}: the output")
        if self._last:
            self._finish_forward(microbatch, kept, output)
        else:
            if not self._training and received is not None:
                output = owned(output, received)
            kept.output = output
        self.busy_seconds += time.perf_counter() - start
        if received is not None:
            if self._training:
                received.after_forward()
            else:
                kept.input = None
                del output, kept
                assert self._inputs is not None
                self._inputs.give_back(received)
        if self._hands_forward:
            self.send_forward(microbatch)
        elif self._last and not self._training:
            del self._microbatches[microbatch]

    def _without_input(self, error: TypeError) -> InputError:
        who = "this rank holds the first stage"
        if self._two_copies:
            who = "both ends of a schedule of two model copies hold a first and a last stage"
        return InputError(
            f"{self._where}: {who}, so step(x, target=y) needs the batch here, and no positional argument was given "
            f"({error})"
        )

    def _finish_forward(self, microbatch: int, kept: MicrobatchState, output: Any) -> None:
        share, received = kept.share, kept.input
        if self._with_loss:
            assert self._losses is not None
            target = self._batch.target(microbatch, share)
            options = self._batch.loss_kwargs(microbatch, share)
            weight = (lambda: self._weight(microbatch, share)) if self._training else None
            leaves = () if received is None else received.leaves
            loss = self._losses.compute(microbatch, output, target, options, weight, leaves)
            if self.find_nan:
                require_finite(loss, f"{self._where}, microbatch {microbatch}: the loss")
            self.losses[microbatch] = owned(loss, received)
        if self._keep_results:
            # What cannot be merged is an error of this step on every rank.
            if not self._batch.merges:
                pass
            elif not self.results:
                require_mergeable(output, self._batch.merge_spec)
            else:
                require_alike(next(iter(self.results.values())), output, microbatch, self._batch.merge_spec)
            self.results[microbatch] = owned(detached(output), received)

    def send_forward(self, microbatch: int) -> None:
        """SEND_F: sends the output on and keeps only its autograd nodes."""
        assert self._send_forward is not None
        kept = self._microbatches[microbatch]
        output, kept.output = kept.output, None
        share = kept.share
        tensors = self._send_forward.send(output, microbatch, share.rows, share.batch_rows, kept.input)
        if self._training:
            kept.nodes = [gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
        else:
            del self._microbatches[microbatch]

    def backward(self, microbatch: int) -> None:
        """B: waits for the output's gradients, runs backward, and ends the leases of what was received."""
        kept = self._backward(microbatch, split=False)
        kept.take_over()
        self._end_leases(kept)
        self._after_backward(microbatch, kept)

    def backward_before_send(self, microbatch: int) -> None:
        """B, which its SEND_B follows at once: that ends the leases."""
        kept = self._backward(microbatch, split=False)
        if isinstance(kept.gradients, CopiesLease):  # the stage's own memory: it need not live through a send
            kept.take_over()
            self._end_leases(kept)
        self._after_backward(microbatch, kept)

    def input_backward(self, microbatch: int) -> None:
        """I: the input's half of B; what the weights' half needs stays."""
        kept = self._backward(microbatch, split=True)
        kept.take_over()
        if kept.weight_work is None:  # there was no part to leave for W
            self._end_leases(kept)
        self._after_backward(microbatch, kept)

    def weight_backward(self, microbatch: int) -> None:
        """W: the weights' half of B, unless I had to do both."""
        kept = self._microbatches.get(microbatch)
        work = kept.weight_work if kept is not None else None
        if kept is None or work is None:
            return
        kept.weight_work = None
        start = time.perf_counter()
        self._adding = True
        set_current(kept.current)
        work.run()
        self._adding = False
        self._added += 1
        self._settle(microbatch, kept, [])
        self.busy_seconds += time.perf_counter() - start
        del work
        self._end_leases(kept)
        if kept.passed_on is None:
            del self._microbatches[microbatch]

    def _backward(self, microbatch: int, *, split: bool) -> MicrobatchState:
        """Runs a whole backward, or its half of the input."""
        kept = self._microbatches[microbatch]
        roots, gradients = self._roots(microbatch, kept)
        received = kept.input
        start = time.perf_counter()
        set_current(kept.current)  # for what recomputes its forward
        try:
            if roots and split:
                of_batch = self._batch.leaves
                leaves = of_batch if received is None else [*of_batch, *received.leaves]
                self._adding = None
                kept.weight_work = self._split.begin(roots, gradients, leaves, gathering=bool(of_batch))
            elif roots:
                self._adding = True
                run_backward(roots, gradients)
        except RuntimeError as error:
            self._advise(error)
            raise
        self._adding = False
        if kept.weight_work is None:
            self._added += 1
        del roots, gradients
        self._settle(microbatch, kept, [] if received is None else received.leaves)
        if received is not None:
            if self._send_backward is not None:
                kept.passed_on = [leaf.grad for leaf in received.leaves]
            received.leaves = []
        self.busy_seconds += time.perf_counter() - start
        return kept

    def _advise(self, error: RuntimeError) -> None:
        if "backward through the graph a second time" in str(error):
            error.add_note(
                f"pypipe: {self._where}: each microbatch has a backward of its own, so its graph must not reach into "
                "that of another one: compute in each forward what the module keeps for later ones (a cached weight), "
                "or detach() it (a state that is carried on)"
            )

    def _roots(self, microbatch: int, kept: MicrobatchState) -> tuple[list[Any], list[Tensor]]:
        """Where a backward begins, and with which gradients; waits for those."""
        if self._gradients is None:
            assert self._losses is not None
            return self._losses.roots(microbatch, self._weight(microbatch, kept.share))
        self._new_gradients.look()
        lease = kept.gradients = self._gradients.take(microbatch)
        self.on_ready()
        tree, lease.tree = lease.tree, None
        pairs = [pair for pair in zip(kept.nodes, tree, strict=True) if pair[1] is not None]
        kept.nodes = []
        return [node for node, _ in pairs], [gradient for _, gradient in pairs]

    def _settle(self, microbatch: int, kept: MicrobatchState, leaves: Sequence[Tensor]) -> None:
        """Takes care of the gradients that a backward, or one half of it, has added."""
        self._new_gradients.own(kept.input, kept.gradients)
        if self._moves_gradients:
            for wrapper in self._wrappers:
                wrapper.after_backward()
        if self.find_nan:
            self._require_finite_gradients(microbatch, leaves)

    def _after_backward(self, microbatch: int, kept: MicrobatchState) -> None:
        if self._hands_backward:
            self.send_backward(microbatch)
        elif kept.passed_on is None and kept.weight_work is None:
            del self._microbatches[microbatch]

    def _end_leases(self, kept: MicrobatchState) -> None:
        received, kept.input = kept.input, None
        if received is not None:
            assert self._inputs is not None
            self._inputs.give_back(received)
        gradients, kept.gradients = kept.gradients, None
        if gradients is not None:
            assert self._gradients is not None
            self._gradients.give_back(gradients)

    def _require_finite_gradients(self, microbatch: int, leaves: Sequence[Tensor]) -> None:
        where = f"{self._where}, backward, microbatch {microbatch}: the gradient of "
        for number, leaf in enumerate(leaves):
            if leaf.grad is not None:
                require_finite(leaf.grad, f"{where}the input's tensor {number}")
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                require_finite(parameter.grad, f"{where}{name}")

    def end_step(self) -> None:
        """After the last action of a step without an error."""
        if self._inputs is not None:
            self._inputs.end_step(training=self._training)
        if not self._training:
            return
        if self._losses is not None:
            self._losses.end_step()
        if self._gradients is not None:
            self._gradients.end_step()
        self._deferred_hooks.run()

    def send_backward(self, microbatch: int) -> None:
        """SEND_B: sends the input's gradients back; None where there is none."""
        channel = self._send_backward
        assert channel is not None
        kept = self._microbatches[microbatch]
        is_over = kept.weight_work is None  # else W needs the leases
        is_leased = kept.input is not None or kept.gradients is not None
        if is_over and is_leased and not channel.has_room():
            kept.take_over()
            self._end_leases(kept)
        gradients, kept.passed_on = kept.passed_on, None
        assert gradients is not None
        channel.send(gradients[0] if len(gradients) == 1 else gradients, microbatch, 0, 0)
        if is_over:
            del gradients  # they may lie in the leases' memory
            self._end_leases(kept)
            del self._microbatches[microbatch]

    def _weight(self, microbatch: int, share: Share) -> float:
        """The microbatch's weight in the batch's loss, scaled as gradients are to be."""
        weight = self._batch.weight(microbatch, share) if self._scale_grads else 1.0
        return weight if self._loss_scale is None else weight * self._loss_scale()


def _nothing() -> None:
    pass
