"""One stage's part of a step: forward, backward, and what is kept between them.

Memory is given back as early as the maths allows. After a forward, only the autograd nodes of its outputs are kept,
not the outputs. After a backward, the slots of what was received go back. Where the gradient is sent on at once, that
goes first, since somebody waits for it; but if the send may have to wait, they do: it may be for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pypipe.program import Kind
from pypipe.runtime.autograd.deferred_hooks import DeferredHooks
from pypipe.runtime.autograd.engine import gradient_edge, run_backward
from pypipe.runtime.autograd.split import SplitBackward, WeightWork
from pypipe.runtime.batch.batch import Batch, ChunkSpecs, Share
from pypipe.runtime.batch.merging import require_mergeable
from pypipe.runtime.batch.structure import map_tensors
from pypipe.runtime.data_parallel.wrappers import Wrapper
from pypipe.runtime.diagnostics.checks import require_finite
from pypipe.runtime.step.losses import Losses
from pypipe.runtime.tensor_memory import copy_of
from pypipe.runtime.transport.channels import ReceiveChannel, Received, SendChannel
from pypipe.runtime.transport.distributed_tensors import Meshes
from pypipe.runtime.transport.gradient_leases import GradientLoans, Loan
from pypipe.runtime.transport.local import Handed, LocalChannel

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
        where: how messages call this stage.
        loss: on the last stage, the loss function, or None.
        scale_grads: whether gradients are those of the mean over the batch (else of the sum over microbatches).
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
        self._losses = Losses(loss, module, where, weighs=scale_grads) if last and loss is not None else None
        self._scale_grads = scale_grads
        self._receive_forward = receive_forward
        if receive_forward is not None:
            receive_forward.meshes = Meshes(module, where, get_mesh)
        self._send_forward = send_forward
        self._receive_backward = receive_backward
        self._loans = GradientLoans(receive_backward, splits=splits) if receive_backward is not None else None
        self._send_backward = send_backward
        # Stages of one rank hand over in memory, as part of F and B: programs have no action for it.
        self._hands_forward = isinstance(send_forward, LocalChannel)
        self._hands_backward = isinstance(send_backward, LocalChannel)
        self._wrappers = wrappers
        self._moves_gradients = any(wrapper.moves_gradients for wrapper in wrappers)
        self._deferred_hooks = DeferredHooks()
        self._split = SplitBackward(where)
        self.busy_seconds = 0.0
        self.on_ready: Callable[[], None] = _nothing
        """Called when an action has the message that it waited for."""
        self.find_nan = False
        """Whether everything that comes out of an action is looked through for NaN and infinity."""
        self.reset()

    def reset(self) -> None:
        """Forgets everything of a step, also of one that failed."""
        for wrapper in self._wrappers:
            wrapper.end()
        self._deferred_hooks.give_back()
        for channel in (self._send_forward, self._send_backward):
            if isinstance(channel, LocalChannel):
                channel.reset()
        self._inputs: dict[int, Received | Handed] = {}
        self._shares: dict[int, Share] = {}
        self._outputs: dict[int, Any] = {}
        self._nodes: dict[int, list[Any]] = {}
        self._input_gradients: dict[int, list[Tensor | None]] = {}
        if self._losses is not None:
            self._losses.reset()
        self._rests: dict[int, tuple[WeightWork, Received | Handed | None, Loan | None]] = {}
        self._owed: tuple[Received | Handed | None, Loan | None] | None = None
        self._fresh: list[Tensor] | None = []
        self._added = 0  # backwards whose gradients are all in `.grad`
        self._adding: bool | None = False  # now; None: in I, where it depends on the graph
        self._batch: Batch = _NOTHING
        self.losses: dict[int, Tensor] = {}
        self.results: dict[int, Any] = {}

    def begin(self, batch: Batch, *, training: bool, keep_results: bool, with_loss: bool, loss_kwargs: Any) -> None:
        """Starts a step; the batch is the rank's, so every stage of a rank gets its keyword arguments."""
        self.reset()
        self._batch = batch
        self._training = training
        self._keep_results = keep_results and self._last
        self._with_loss = with_loss and self._last
        self._loss_kwargs: dict[str, Any] = loss_kwargs or {}
        if training:
            self._deferred_hooks.begin(self._module)
        for wrapper in self._wrappers:
            wrapper.begin(training=training)
        self.busy_seconds = 0.0
        channels = [self._receive_forward, self._send_forward]
        channels += [self._receive_backward, self._send_backward] if training else []
        for channel in channels:
            if isinstance(channel, (ReceiveChannel, SendChannel)):
                channel.begin(training=training)
        if training and (self._receive_forward is not None or self._loans is not None):
            self._fresh = None

    def _find_fresh(self) -> None:
        """Finds the leaves without a `.grad`. Done before the stage's first wait: walking a module takes long."""
        self._fresh = [p for p in self._module.parameters() if p.requires_grad and p.grad is None]
        self._fresh += self._batch.leaves

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

    def abandon(self) -> list[str]:
        """After a step that failed; returns what has become of gradients that replicas were to share, in words."""
        said = [said for wrapper in self._wrappers if (said := wrapper.abandon()) is not None]
        return [f"{self._where}: {text}" for text in dict.fromkeys(said)]

    @property
    def added(self) -> Added:
        """What this step has added to `.grad`."""
        early = sum(work.early for work, _, _ in self._rests.values())
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
        received: Received | Handed | None = None
        if self._receive_forward is None:
            share = batch.share(microbatch)
            args = batch.args(microbatch)
        else:
            if self._fresh is None:
                self._find_fresh()
            received = self._receive_forward.receive(microbatch, training=self._training)
            self.on_ready()
            share = Share(received.rows, received.batch_rows)
            tree = received.tree
            args = tuple(tree) if isinstance(tree, (tuple, list)) else (tree,)
            received.tree = tree = None
        self._shares[microbatch] = share
        start = time.perf_counter()
        output = self._module(*args, **batch.kwargs(microbatch, share))
        del args
        if self.find_nan:
            require_finite(output, f"{self._where}, forward, microbatch {microbatch}: the output")
        if self._last:
            self._finish_forward(microbatch, share, output, received)
        else:
            if not self._training and received is not None:
                output = _kept(output, received)
            self._outputs[microbatch] = output
        self.busy_seconds += time.perf_counter() - start
        if received is not None:
            if self._training:
                received.settle()
                self._inputs[microbatch] = received
            else:
                received.release()
        if self._hands_forward:
            self.send_forward(microbatch)

    def _finish_forward(self, microbatch: int, share: Share, output: Any, received: Received | Handed | None) -> None:
        if self._with_loss:
            assert self._losses is not None
            target = self._batch.target(microbatch, share)
            weight = (lambda: self._weight(microbatch, share)) if self._training else None
            loss = self._losses.compute(microbatch, output, target, self._loss_kwargs, weight)
            if self.find_nan:
                require_finite(loss, f"{self._where}, microbatch {microbatch}: the loss")
            self.losses[microbatch] = _kept(loss, received)
        if self._keep_results:
            if not self.results:  # a spec that does not fit is an error of this step on every rank
                require_mergeable(output, self._batch.merge_spec)
            self.results[microbatch] = _kept(_detached(output), received)

    def send_forward(self, microbatch: int) -> None:
        """SEND_F: sends the output on and keeps only its autograd nodes."""
        assert self._send_forward is not None
        share = self._shares.pop(microbatch)
        tensors = self._send_forward.send(
            self._outputs.pop(microbatch), microbatch, share.rows, share.batch_rows, self._inputs.get(microbatch)
        )
        if self._training:
            self._nodes[microbatch] = [gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]

    def backward(self, microbatch: int) -> None:
        """B: waits for the output's gradients, runs backward, and gives the input's slot back."""
        self._begin_backward(microbatch, split=False)

    def backward_before_send(self, microbatch: int) -> None:
        """B, which its SEND_B follows at once: that gives the slots back."""
        self._begin_backward(microbatch, split=False, owes=True)

    def input_backward(self, microbatch: int) -> None:
        """I: the input's half of B; what the weights' half needs stays."""
        self._begin_backward(microbatch, split=True)

    def weight_backward(self, microbatch: int) -> None:
        """W: the weights' half of B, unless I had to do both."""
        rest = self._rests.pop(microbatch, None)
        if rest is None:
            return
        work, inputs, loan = rest
        start = time.perf_counter()
        self._adding = True
        work.run()
        self._adding = False
        self._added += 1
        if self._fresh:
            self._own_fresh_gradients(inputs, loan)
        if self._moves_gradients:
            self._after_backward()
        if self.find_nan:
            self._require_finite_gradients(microbatch, [])
        self.busy_seconds += time.perf_counter() - start
        del rest, work
        self._give_back(inputs, loan)

    def _give_back(self, inputs: Received | Handed | None, loan: Loan | None) -> None:
        if inputs is not None:
            inputs.release()
        if loan is not None:
            assert self._loans is not None
            self._loans.give_back(loan)

    def _begin_backward(self, microbatch: int, *, split: bool, owes: bool = False) -> None:
        loan: Loan | None = None
        roots: list[Any]
        gradients: list[Tensor]
        if self._loans is None:
            assert self._losses is not None
            weight = self._weight(microbatch, self._shares.pop(microbatch))
            roots, gradients = self._losses.roots(microbatch, weight)
        else:
            if self._fresh is None:
                self._find_fresh()
            loan = self._loans.take(microbatch)
            self.on_ready()
            owes = owes and loan.slot is not None  # copies are no slot, and need not live through a send
            pairs = list(zip(self._nodes.pop(microbatch), loan.gradients, strict=True))
            loan.gradients = []
            roots = [node for node, gradient in pairs if gradient is not None]
            gradients = [gradient for _, gradient in pairs if gradient is not None]
            del pairs
        inputs = self._inputs.pop(microbatch, None)
        work: WeightWork | None = None
        start = time.perf_counter()
        if roots and split:
            of_batch = self._batch.leaves
            leaves = of_batch if inputs is None else [*of_batch, *inputs.leaves]
            self._adding = None
            work = self._split.begin(roots, gradients, leaves, gathering=bool(of_batch))
        elif roots:
            self._adding = True
            run_backward(roots, gradients)
        self._adding = False
        if work is None:
            self._added += 1
        del roots, gradients
        if self._fresh:
            self._own_fresh_gradients(inputs, loan)
        if self._moves_gradients:
            self._after_backward()
        if self.find_nan:
            self._require_finite_gradients(microbatch, [] if inputs is None else inputs.leaves)
        if inputs is not None:
            if self._send_backward is not None:
                passed_on = [leaf.grad for leaf in inputs.leaves]
                self._input_gradients[microbatch] = passed_on if owes else _owned(passed_on, inputs, loan)
                del passed_on
            inputs.leaves = []
        self.busy_seconds += time.perf_counter() - start
        if work is not None:
            self._rests[microbatch] = (work, inputs, loan)
        if self._hands_backward:
            self.send_backward(microbatch)
        if owes:
            self._owed = (inputs, loan)
        elif work is None:
            self._give_back(inputs, loan)

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
        if not self._training:
            return
        if self._loans is not None:
            self._loans.end_step()
        self._deferred_hooks.run()

    def send_backward(self, microbatch: int) -> None:
        """SEND_B: sends the input's gradients back; None where there is none."""
        channel = self._send_backward
        assert channel is not None
        owed, self._owed = self._owed, None
        gradients = self._input_gradients.pop(microbatch)
        if owed is not None and not channel.has_room():
            gradients = _owned(gradients, *owed)
            self._give_back(*owed)
            owed = None
        channel.send(gradients[0] if len(gradients) == 1 else gradients, microbatch, 0, 0)
        if owed is not None:
            del gradients  # they may lie in the slots
            self._give_back(*owed)

    def _weight(self, microbatch: int, share: Share) -> float:
        """The microbatch's weight in the batch's loss."""
        return self._batch.weight(microbatch, share) if self._scale_grads else 1.0

    def _own_fresh_gradients(self, *slots: Received | Handed | Loan | None) -> None:
        """Makes a `.grad` that lies in a slot a tensor of its own; the slot's memory is only lent.

        Autograd may make a received gradient, or a view of it, some tensor's first `.grad`, and a backward may hand
        out a saved activation. Later ones are added to the first.
        """
        assert self._fresh is not None
        for tensor in self._fresh:
            if tensor.grad is not None and any(slot is not None and slot.holds(tensor.grad) for slot in slots):
                tensor.grad = copy_of(tensor.grad)
        if not self._moves_gradients:
            self._fresh = [tensor for tensor in self._fresh if tensor.grad is None]

    def _after_backward(self) -> None:
        for wrapper in self._wrappers:
            wrapper.after_backward()


def _nothing() -> None:
    pass


def _detached(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach()
    return map_tensors(tree, Tensor.detach)


def _owned(gradients: list[Tensor | None], *lenders: Received | Handed | Loan | None) -> list[Tensor | None]:
    """The gradients, copied where their memory is only lent, and about to be given back."""
    owned = []
    for gradient in gradients:
        for lender in lenders:
            if gradient is not None and lender is not None and lender.holds(gradient):
                gradient = copy_of(gradient)
                break
        owned.append(gradient)
    return owned


def _kept(tree: Any, *lenders: Received | Handed | Loan | None) -> Any:
    """`tree`, with copies of the tensors whose memory is only lent, and about to be given back."""

    def kept(tensor: Tensor) -> Tensor:
        lent = any(lender is not None and (tensor.is_nested or lender.holds(tensor)) for lender in lenders)
        return copy_of(tensor) if lent else tensor

    if isinstance(tree, Tensor):
        return kept(tree)
    return map_tensors(tree, kept)
