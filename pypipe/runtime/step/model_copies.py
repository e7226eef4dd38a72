"""Combines the results of two copies of one model (DualPipe) at the end of a step.

A program with two chains of stages holds each piece of the model twice, usually on two ranks. A step's gradients of
both copies are added up, so that each rank's optimizer sees those of the whole batch, and the last stages exchange
their losses and outputs. This uses separate links, one for each pair of ranks and direction (of kind W).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pypipe.errors import InputError
from pypipe.program import Program
from pypipe.runtime.step.exchanges import Exchange, Exchanges
from pypipe.runtime.torch_private import pytree

__all__ = ["ModelCopies"]

# One message's worth of gradients: large enough for bandwidth, and little memory for slots.
_BUCKET_BYTES = 8 << 20

Part = tuple[nn.Parameter, int, int]  # of the parameter's flattened gradient


class ModelCopies:
    """One rank's part in the exchange.

    Args:
        program: with two chains.
        rank: this rank.
        modules: by their stage in the program, those of this rank.
        exchanges: this rank's, over `pypipe.program.copy_channels`.
        loss: the loss function, where it is a module: its parameters are the last stages' too.
        replicated: the stages whose gradients are reduced among replicas.
        tied: ids of parameters whose gradients `Ties` adds up, those of both copies too.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        modules: Mapping[int, nn.Module],
        exchanges: Exchanges,
        loss: nn.Module | None = None,
        replicated: Collection[int] = (),
        tied: Collection[int] = (),
    ) -> None:
        self._replicated = {id(p) for stage in replicated for p in modules[stage].parameters()}
        self._before: list[tuple[nn.Parameter, Tensor | None]] = []  # .grad of earlier steps
        self._kept: set[int] = set()  # by id: parameters of the first copy, which keep it in a step
        self._last: Exchange | None = None
        # Piece by piece, the same order on both ranks of a pair. A parameter that two stages of a rank share counts
        # for the first of them.
        self._apart: list[tuple[Exchange, list[nn.Parameter]]] = []
        self._beside: list[tuple[nn.Parameter, nn.Parameter]] = []
        seen: set[int] = set()

        def trained(stage: int) -> list[nn.Parameter]:
            parameters = list(modules[stage].parameters())
            if loss is not None and program.next_stage(stage) is None:
                parameters += loss.parameters()
            return list({id(p): p for p in parameters if p.requires_grad and id(p) not in tied}.values())

        for a, b in sorted(zip(*(chain.stages for chain in program.chains), strict=True)):
            for mine, other in ((a, b), (b, a)):
                if program.placement[mine] != rank:
                    continue
                parameters = [p for p in trained(mine) if id(p) not in seen]
                seen.update(map(id, parameters))
                if mine == a:
                    self._kept.update(map(id, parameters))
                if program.placement[other] == rank:
                    if mine == a:
                        pairs = zip(trained(mine), trained(other), strict=True)
                        self._beside += [(p, q) for p, q in pairs if p is not q]
                    continue
                exchange = exchanges.between(mine, other)
                self._apart.append((exchange, parameters))
                if program.next_stage(mine) is None:
                    self._last = exchange
        self._buckets = [(exchange, _buckets(parameters)) for exchange, parameters in self._apart]
        listed = [p for _, parameters in self._apart for p in parameters]
        listed += [p for pair in self._beside for p in pair]
        self._parameters = list({id(p): p for p in listed}.values())

    def begin(self) -> None:
        """Sets the second copy's `.grad` of earlier steps aside; the first one's counts for both.

        It stays where it is, and this step's gradients are added to it: where earlier steps were not reduced among
        replicas (no_sync()), this step's reduction reduces what there is of them too.
        """
        for parameter in self._parameters:
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise InputError(
                    "a parameter has a hook that runs as soon as its gradient is there (such as an optimizer step in "
                    "the backward), but here gradients are complete only at the end of step(), when those of the two "
                    "copies have been added up: remove the hook and call the optimizer after step()"
                )
        self._before = [(parameter, parameter.grad) for parameter in self._parameters]
        for parameter in self._parameters:
            if id(parameter) in self._kept:
                continue
            before, parameter.grad = parameter.grad, None
            if before is not None and id(parameter) in self._replicated:
                # A reducer has counted the backwards of steps without a reduction: it expects a gradient.
                parameter.grad = torch.zeros_like(before)

    def abandon(self) -> None:
        """After an error: gives parameters their gradients of earlier steps back.

        The first copy's have this step's in them by then, as far as it came.
        """
        for parameter, before in self._before:
            if before is None or id(parameter) not in self._kept:
                parameter.grad = before
        self._before = []

    @torch.no_grad()
    def finish(self) -> None:
        """Adds up both copies' gradients."""
        for p, q in self._beside:
            total = _sum(p.grad, q.grad)
            p.grad, q.grad = total, None if total is None else total.clone()
        for exchange, buckets in self._buckets:
            totals: dict[nn.Parameter, Tensor] = {}
            for bucket in buckets:
                exchange.begin([_part_of(*part) for part in bucket])
                for part, theirs in zip(bucket, exchange.receive(), strict=True):
                    _add_part(*part, theirs, totals)
                exchange.release()
            for parameter, total in totals.items():
                parameter.grad = total
        if any(before is not None for _, before in self._before):
            for exchange, _ in self._buckets:
                exchange.finish()
        for parameter, before in self._before:
            if before is None:
                continue
            if parameter.grad is None:
                parameter.grad = before
            elif before.layout == parameter.grad.layout:
                parameter.grad = before.copy_(parameter.grad)  # in the memory that it was in, as a backward does
        self._before = []

    @torch.no_grad()
    def share_results(self, losses: dict[int, Tensor], outputs: dict[int, Any], rows: int) -> None:
        """Completes the losses and outputs of one copy's microbatches by those of the other's; by microbatch.

        Args:
            losses, outputs: of the last stage that is on this rank, if one is.
            rows: the batch's length here, which must be the same there; 0: unknown.
        """
        exchange = self._last
        if exchange is None:
            return
        mine = sorted(outputs)
        # As copies: the caller may change the results while they are still on their way.
        exchange.begin(_copy({"losses": dict(losses), "outputs": mine, "rows": rows}))
        head = _copy(exchange.receive())
        exchange.release()
        if head["rows"] != rows:
            raise InputError(
                f"the batch has {rows} rows here and {head['rows']} at the other end of the pipeline: both ends are "
                "given the same whole batch, of which each uses its microbatches"
            )
        theirs = head["outputs"]
        for turn in range(max(len(mine), len(theirs))):
            answered = turn < len(theirs)
            if turn < len(mine):
                exchange.begin(_copy(outputs[mine[turn]]), answered=answered)
            else:
                exchange.expect()
            if answered:
                outputs[theirs[turn]] = _copy(exchange.receive())
                exchange.release()
        losses.update(head["losses"])


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[Part]]:
    """The gradients of these parameters in messages of limited size."""
    buckets: list[list[Part]] = []
    room = 0
    for parameter in parameters:
        start, count = 0, parameter.numel()
        while start < count or (start == count == 0):
            if room < parameter.element_size():
                buckets.append([])
                room = _BUCKET_BYTES
            stop = min(count, start + room // parameter.element_size())
            buckets[-1].append((parameter, start, stop))
            room -= (stop - start) * parameter.element_size()
            start = stop
            if count == 0:
                break
    return buckets


def _part_of(parameter: nn.Parameter, start: int, stop: int) -> Any:
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        if start:
            return None
        return gradient._indices(), gradient._values(), tuple(gradient.shape)
    if not gradient.is_contiguous():
        gradient = parameter.grad = gradient.contiguous()
    return gradient.view(-1)[start:stop]


def _add_part(parameter: nn.Parameter, start: int, stop: int, theirs: Any, totals: dict[nn.Parameter, Tensor]) -> None:
    """Adds up in new memory: what was there may still be on its way."""
    mine = parameter.grad
    if isinstance(theirs, tuple):
        indices, values, shape = theirs
        theirs = torch.sparse_coo_tensor(indices.clone(), values.clone(), shape)
        totals[parameter] = theirs if mine is None else mine + theirs
        return
    if theirs is None or (parameter in totals and totals[parameter].is_sparse):
        return
    total = totals.get(parameter)
    if total is None:
        like = parameter if mine is None else mine.to_dense() if mine.is_sparse else mine
        total = totals[parameter] = torch.empty_like(like, memory_format=torch.contiguous_format)
    part = total.view(-1)[start:stop]
    if mine is None:
        part.copy_(theirs)
    else:
        mine = mine.to_dense() if mine.is_sparse else mine
        torch.add(mine.reshape(-1)[start:stop], theirs, out=part)


def _copy(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, tree)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
