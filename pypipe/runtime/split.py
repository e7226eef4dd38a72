"""The input half (I) and the weight half (W) of one microbatch's backward.

I is one run of autograd's engine that ends at the stage's inputs: it executes the nodes that lead there, each of which
computes the gradients of those edges alone, and no weight's. The gradients that arrive at nodes with weights are
kept. W calls these nodes again, for their other edges, and lets the engine carry the results into the weights' `.grad`,
as in any backward. So every gradient is computed once, hooks run once, and what W needs is what autograd saved anyway.

torch.distributed.pipelining's `_backward.py` starts engine runs at the nodes instead: there hooks run twice, a weight
that is used twice has the chain between its uses run again, `.grad` is set past DDP's hooks, and all that the graph
saved stays till W. Here a node is called inside a run whose only purpose is to tell it which of its edges count
(`_call_for_weights`), and what the chain saved is dropped at the end of I.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pypipe.runtime.backward import as_recorded, run_backward
from pypipe.runtime.split_plan import Node, SplitPlan, WeightEdge, plan_split, saved_by

__all__ = ["SplitBackward", "WeightWork"]

# W hands this many bytes of weight gradients to autograd at once: few runs, and little memory on top of `.grad`.
_BATCH_BYTES = 32 << 20

_Call = tuple[Node, tuple[Tensor | None, ...], list[WeightEdge]]


@dataclass(slots=True)
class _Group:
    """Weights that share nodes: what leads to them, and what has arrived there."""

    nbytes: int
    calls: list[_Call] = field(default_factory=list)
    roots: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


class WeightWork:
    """W of one microbatch.

    It holds references to the gradients and activations that it needs, which may lie in the slots that the stage
    received: these can be given back after `run()`.
    """

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups

    def run(self) -> None:
        """Computes the weights' gradients, adds them to `.grad`, and lets go of everything."""
        groups, self._groups = self._groups[::-1], []
        while groups:
            batch = [groups.pop()]
            nbytes = batch[0].nbytes
            while groups and nbytes + groups[-1].nbytes <= _BATCH_BYTES:
                nbytes += groups[-1].nbytes
                batch.append(groups.pop())
            roots = [root for group in batch for root in group.roots]
            gradients = [gradient for group in batch for gradient in group.gradients]
            calls = [call for group in batch for call in group.calls]
            del batch
            if calls:
                _call_for_weights(calls, roots, gradients)
            if roots:
                run_backward(roots, gradients)


class SplitBackward:
    """Splits a stage's backwards.

    Args:
        where: how messages call the stage.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._warned = False

    def begin(self, roots: list[Any], gradients: list[Tensor], inputs: Iterable[Tensor]) -> WeightWork | None:
        """I: adds the gradients of `inputs` to their `.grad`. What it returns is W; None if nothing is left to do.

        Where (some) weights cannot be left to W, their gradients are computed and added here; a warning says so, once.

        Args:
            roots: tensors or gradient edges, with one gradient each.
            inputs: the leaves at which the stage begins; those that the roots don't lead to are left alone.
        """
        edges = [torch.autograd.graph.get_gradient_edge(root) if isinstance(root, Tensor) else root for root in roots]
        plan = plan_split([edge.node for edge in edges], inputs)
        if plan.reasons:
            self._warn(plan)
        if plan.whole:
            run_backward(roots, gradients)
            return None
        groups = {group: _Group(plan.group_bytes[group]) for group in dict.fromkeys(plan.groups.values())}
        now: list[tuple[GradientEdge, Tensor]] = []
        for edge, gradient in zip(edges, gradients, strict=True):
            group = plan.groups.get(edge.node)
            if group is None:
                now.append((edge, gradient))
            else:
                groups[group].roots.append(edge)
                groups[group].gradients.append(gradient)
        if now:
            for node, arrived in _run_inputs(plan, now):
                found = plan.weight_edges[node]
                groups[plan.groups[found[0][1]]].calls.append((node, arrived, found))
        return WeightWork([group for group in groups.values() if group.calls or group.roots])

    def _warn(self, plan: SplitPlan) -> None:
        if self._warned:
            return
        self._warned = True
        which = "all weights" if plan.whole else f"{len(plan.early)} of its weights"
        warnings.warn(
            f"{self._where}: the gradients of {which} are computed in action I, not in W; they are right, but the "
            f"schedule has less to fill its bubbles with. The reason: {'; '.join(plan.reasons)}",
            stacklevel=2,
        )


def _run_inputs(plan: SplitPlan, roots: list[tuple[GradientEdge, Tensor]]) -> list[tuple[Node, Any]]:
    """Runs the chain; returns the gradients that arrived at nodes with weights, in the order of execution."""
    captured: list[tuple[Node, Any]] = []
    handles = [node.register_prehook(partial(_capture, captured, node)) for node in plan.weight_edges]
    try:
        run_backward([edge for edge, _ in roots], [gradient for _, gradient in roots], ends=plan.ends, keep_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    for node in plan.spent:
        _drop_saved(node)
    return captured


def _capture(captured: list[tuple[Node, Any]], node: Node, gradients: tuple[Tensor | None, ...]) -> None:
    if any(gradient is not None for gradient in gradients):
        captured.append((node, gradients))


def _drop_saved(node: Node) -> None:
    """Frees what a node saved. Others in the graph may keep the node itself."""
    for saved in saved_by(node):
        try:
            saved.register_hooks(_forget, _forgotten)
        except RuntimeError:  # there was nothing, or somebody else's hooks hold it
            continue
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        vars(node).clear()


def _forget(_: Tensor) -> None:
    return None


def _forgotten(_: None) -> Tensor:
    raise RuntimeError(
        "a backward runs a second time through the graph of a stage, whose first was split in two halves and freed it"
    )


def _call_for_weights(calls: list[_Call], roots: list[GradientEdge], gradients: list[Tensor]) -> None:
    """Calls nodes for the gradients of their weight edges alone; appends these edges and gradients.

    A node asks the engine's current run which of its edges are wanted. So this is a run that ends at the weight edges
    and in which nothing executes but one function, which calls the nodes.
    """
    anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        root = _Inside.apply(anchor, partial(_call, calls, roots, gradients))  # type: ignore[no-untyped-call]
    ends = [GradientEdge(child, output) for _, _, found in calls for _, child, output in found]
    device = next(gradient.device.type for _, arrived, _ in calls for gradient in arrived if gradient is not None)
    with as_recorded(device):
        run_backward([root], [torch.zeros(())], ends=[anchor, *ends])


def _call(calls: list[_Call], roots: list[GradientEdge], gradients: list[Tensor]) -> None:
    calls.reverse()
    while calls:
        node, arrived, found = calls.pop()
        results = node(*arrived)
        if not isinstance(results, tuple):
            results = (results,)
        for position, child, output in found:
            if results[position] is not None:
                roots.append(GradientEdge(child, output))
                gradients.append(results[position])
        del results, arrived
        _drop_saved(node)


class _Inside(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        ctx.call()
        return None, None
