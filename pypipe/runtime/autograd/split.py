"""The input half (I) and the weight half (W) of one microbatch's backward.

I is one run of autograd's engine that ends at the stage's inputs. It executes the nodes that lead there, and each of
them computes only the gradients that go that way, none of a weight. The gradients that arrive at nodes with weights are
kept. W calls these nodes again, for their other edges, and lets the engine carry the results into the weights' `.grad`,
as in any backward. So every gradient is computed once, hooks run once, and W needs only what autograd saved anyway.

torch.distributed.pipelining's `_backward.py` starts engine runs at the nodes instead. There hooks run twice, the chain
between two uses of one weight runs again, `.grad` is set behind the back of DDP's hooks, and everything that the graph
saved stays until W. Here a node is called inside a run whose only purpose is to tell it which of its edges are wanted
(`_WeightCaller`), and what the chain saved is dropped at the end of I.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pypipe.runtime.autograd.engine import gradient_edge, run_backward
from pypipe.runtime.autograd.saved_tensors import drop_saved, drop_weights
from pypipe.runtime.autograd.split_graph import AccumulateGrad, Node, walk
from pypipe.runtime.autograd.split_plan import SplitPlan, SplitPlans
from pypipe.runtime.tensor_memory import copy_of, memory_parts
from pypipe.runtime.torch_private import count_nodes_made, storage_key

__all__ = ["SplitBackward", "WeightWork"]

# W hands this many bytes of weight gradients to autograd at once: few runs, and little memory on top of `.grad`.
_BATCH_BYTES = 32 << 20
# A gradient of more elements than this is summed up to its weight's shape at once, before the others are computed.
_LARGE = 1 << 10

_Gradients = tuple[Tensor | None, ...]
# A node, what arrived there, which of its results go where and whether in their shape, and what it saved.
_Call = tuple[Node, _Gradients, list[tuple[int, GradientEdge, bool]], tuple[str, ...]]


@dataclass(slots=True)
class _Group:
    """Weights that share nodes: what leads to them, and what has arrived there."""

    nbytes: int
    calls: list[_Call] = field(default_factory=list)
    roots: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def add(self, other: _Group) -> None:
        self.nbytes += other.nbytes
        self.calls += other.calls
        self.roots += other.roots
        self.gradients += other.gradients


class WeightWork:
    """W of one microbatch.

    It refers to the gradients and activations that it needs. They may lie in slots that the stage has received, which
    can be given back after `run()`.

    Attributes:
        early: whether I has added some weights' gradients already.
    """

    def __init__(self, groups: list[_Group], caller: _WeightCaller, *, early: bool) -> None:
        self.early = early
        self._groups = groups
        self._caller = caller

    def run(self) -> None:
        """Computes the weights' gradients, adds them to `.grad`, and lets go of everything."""
        groups, self._groups = self._groups[::-1], []
        while groups:
            batch = groups.pop()
            while groups and batch.nbytes + groups[-1].nbytes <= _BATCH_BYTES:
                batch.add(groups.pop())
            roots, gradients, calls = batch.roots, batch.gradients, batch.calls
            owners = [node for node, _, _, _ in calls]  # else a custom Function's node is not kept in Python
            del batch
            if calls:
                self._caller.run(calls, roots, gradients)
            if roots:
                run_backward(roots, gradients)
            del owners


class SplitBackward:
    """Splits a stage's backwards.

    Args:
        where: the stage's name in error messages.

    Attributes:
        adds: whether the last begin() added, or would have added, to weights' `.grad`.
    """

    def __init__(self, where: str) -> None:
        self.adds = False
        self._where = where
        self._caller = _WeightCaller()
        self._plans = SplitPlans()
        self._warned = False
        self._unsplittable: str | None = None
        self._trusted: set[type] = set()  # Functions that have run in I

    def begin(
        self, roots: list[Any], gradients: list[Tensor], inputs: Iterable[Tensor], *, gathering: bool = True
    ) -> WeightWork | None:
        """I: adds the gradients of `inputs` to their `.grad`; returns W, or None if nothing is left to do.

        Where (some) weights cannot be left to W, their gradients are computed and added here; a warning says so, once.

        Args:
            roots: tensors or gradient edges, with one gradient each.
            inputs: the leaves at which the stage begins; those that the roots don't lead to are left alone.
            gathering: whether other backwards, too, add to the inputs' `.grad`.
        """
        self.adds = False
        edges = [gradient_edge(root) if isinstance(root, Tensor) else root for root in roots]
        inputs = list(inputs)
        graph = walk([edge.node for edge in edges], inputs)
        nodes, plan = graph.nodes, self._plans.of(graph)
        if self._unsplittable is not None:
            self._warn([self._unsplittable], "all weights")
        elif plan.reasons:
            self._warn(plan.reasons, "all weights" if plan.whole else f"{len(plan.early)} of its weights")
        self.adds = plan.whole or self._unsplittable is not None or bool(plan.early)
        if plan.whole or self._unsplittable is not None:
            run_backward(roots, gradients)
            return None
        groups = {group: _Group(nbytes) for group, nbytes in plan.group_bytes.items()}
        chain: list[GradientEdge] = []  # where I begins, and with what
        arriving: list[Tensor] = []
        for edge, gradient, group in zip(edges, gradients, plan.root_groups, strict=True):
            if group is None:
                chain.append(edge)
                arriving.append(gradient)
            else:
                groups[group].roots.append(edge)
                groups[group].gradients.append(gradient)
        if chain:
            trusted = plan.functions <= self._trusted
            gathers = [*(inputs if gathering or not trusted else ()), *[nodes[leaf].variable for leaf in plan.early]]
            before = _Accumulated(gathers)
            try:
                captured = self._run_chain(nodes, plan, chain, arriving, drop_at_once=trusted)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if trusted or before.changed():
                    raise
                # A Function may refuse to run for part of a graph, or for a graph that is kept. The whole graph is
                # still there, so a full backward can run; an error with another cause is raised again there.
                self.adds = True
                run_backward(roots, gradients)
                self._unsplittable = f"a Function refused: {str(error).partition(chr(10))[0]}"
                self._warn([self._unsplittable], "all weights")
                return None
            self._trusted |= plan.functions
            if gathers:
                before.separate([gradient for _, arrived in captured for gradient in arrived if gradient is not None])
            for number, arrived in captured:
                each = plan.weight_nodes[number]
                node = nodes[each.node]
                found = [
                    (position, GradientEdge(nodes[child], output), exact)
                    for position, child, output, exact in each.edges
                ]
                groups[each.group].calls.append((node, arrived, found, each.saved))
                if each.made:
                    drop_weights(node, each.operation, {position for position, _, _ in found})
        left = [group for group in groups.values() if group.calls or group.roots]
        return WeightWork(left, self._caller, early=self.adds)

    def _run_chain(
        self,
        nodes: list[Node],
        plan: SplitPlan,
        roots: list[GradientEdge],
        gradients: list[Tensor],
        *,
        drop_at_once: bool,
    ) -> list[tuple[int, _Gradients]]:
        """Runs the chain; returns the gradients that arrived at nodes with weights, in the order of execution.

        A node with weights is given by its number among the plan's.
        """
        captured: dict[int, _Gradients] = {}  # in the order of execution
        capture = captured.__setitem__  # called for every microbatch and node, so without a Python frame
        handles = [nodes[each.node].register_prehook(partial(capture, i)) for i, each in enumerate(plan.weight_nodes)]
        made: set[int] = set()
        if plan.packed:
            handles += [nodes[each.node].register_prehook(partial(_count_nodes, made)) for each in plan.weight_nodes]
        spent = dict(plan.spent)
        if drop_at_once:
            handles += [nodes[number].register_hook(partial(_drop, nodes, spent, number)) for number in spent]
        try:
            ends = [GradientEdge(nodes[number], 0) for number in plan.ends]
            run_backward(roots, gradients, ends=ends, keep_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        for number in list(spent):
            _drop(nodes, spent, number)
        if len(made) > 1:  # something was recomputed, and W will recompute it again
            self._unsplittable = "it computes its forward again in backward"
        return [pair for pair in captured.items() if any(gradient is not None for gradient in pair[1])]

    def _warn(self, reasons: list[str], which: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{self._where}: the gradients of {which} are computed in action I, not in W; they are right, but the "
            f"schedule has less to fill its bubbles with. The reason: {'; '.join(reasons)}",
            stacklevel=3,
        )


def _count_nodes(made: set[int], _: _Gradients) -> None:
    made.add(count_nodes_made())  # how many nodes this thread has made


def _drop(nodes: list[Node], spent: dict[int, tuple[str, ...]], number: int, *_: Any) -> None:
    names = spent.pop(number, None)
    if names is not None:
        drop_saved(nodes[number], names)


class _Accumulated:
    """The `.grad` of leaves before a backward."""

    def __init__(self, leaves: list[Tensor]) -> None:
        self._before = [(leaf, leaf.grad, 0 if leaf.grad is None else leaf.grad._version) for leaf in leaves]

    def changed(self) -> bool:
        """Tells whether the backward has reached any of them."""
        return any(
            leaf.grad is not grad or (grad is not None and grad._version != version)
            for leaf, grad, version in self._before
        )

    def separate(self, kept: list[Tensor]) -> None:
        """Copies each new `.grad` that shares memory with a gradient that is kept: more will be added to it in place.

        Autograd may make a gradient, or a view of it, a leaf's first `.grad`.
        """
        fresh = [leaf for leaf, before, _ in self._before if before is None and leaf.grad is not None]
        if fresh:
            storages = {storage_key(part) for gradient in kept for part in memory_parts(gradient)}
            for leaf in fresh:
                new = leaf.grad
                if new is not None and any(storage_key(part) in storages for part in memory_parts(new)):
                    leaf.grad = copy_of(new)


class _WeightCaller:
    """Calls nodes for the gradients of their weight edges alone.

    A node asks the engine's current run which of its edges are wanted. So this starts a run that ends at the weight
    edges, and executes nothing but a hook, which calls the nodes.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[list[_Call], list[GradientEdge], list[Tensor]]] = []
        # A pipeline may be connected by an eval() under inference_mode, and train later.
        with torch.inference_mode(False), torch.enable_grad():
            self._zero = (torch.zeros(()),)
            node = torch.zeros((), requires_grad=True).view(()).grad_fn
        assert node is not None
        node.register_prehook(partial(_call, self._pending))
        self._root = (GradientEdge(node, 0),)

    def run(self, calls: list[_Call], roots: list[GradientEdge], gradients: list[Tensor]) -> None:
        """Appends the weight edges and their gradients to `roots` and `gradients`."""
        arrived = calls[0][1]
        like = next(gradient for gradient in arrived if gradient is not None)
        ends = [*self._root, *[edge for _, _, found, _ in calls for _, edge, _ in found]]
        self._pending[:] = [(calls, roots, gradients)]
        run_backward(self._root, self._zero, ends=ends, keep_graph=True, like=like)


def _call(pending: list[tuple[list[_Call], list[GradientEdge], list[Tensor]]], _: Any) -> None:
    calls, roots, gradients = pending.pop()
    calls.reverse()
    while calls:
        node, arrived, found, saved = calls.pop()
        results = node(*arrived)
        if not isinstance(results, tuple):
            results = (results,)
        for position, edge, exact in found:
            gradient = results[position]
            if gradient is None:
                continue
            # The engine would do so too, but only when all of them have been computed.
            if not exact and gradient.numel() > _LARGE:
                shape = _expected_shape(edge)
                if gradient.shape != shape:
                    gradient = gradient.sum_to_size(shape)
            roots.append(edge)
            gradients.append(gradient)
        del results, arrived, gradient, found
        drop_saved(node, saved)


def _expected_shape(edge: GradientEdge) -> tuple[int, ...]:
    node: Node = edge.node
    kind: type = type(node)
    if kind is AccumulateGrad:
        leaf: Tensor = node.variable
        return leaf.shape  # in a tenth of the time
    return tuple(node._input_metadata[edge.output_nr].shape)  # a list, which no torch.Size equals
