"""Which part of an autograd graph is the input half of a backward (I), and which is its weight half (W).

A graph's *chain* is what leads to the stage's inputs. I runs the chain, W what hangs off it: a chain node's edge to a
node outside the chain is a weight edge, and everything behind it leads to weights alone. In a stage whose inputs need
no gradient (the first), the chain is what depends on data, so that there, too, I walks down the stage and W does
weights.

Most nodes compute the gradient of each edge apart. Those that don't (a custom autograd.Function, a fused kernel, a node
whose saved tensors are recomputed or unpacked) must do both halves at once: the weights behind them, and those that
share a node with these, are *early*: their gradients are computed and accumulated in I.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from pypipe.runtime.saved import packed, packed_by_checkpoint, saved_by

__all__ = ["Node", "SplitPlan", "WeightEdge", "plan_split"]

Node = Any
WeightEdge = tuple[int, Node, int]  # position among a node's edges, the node behind it, which output of that

# Nodes of torch's own operations; their names end in a number.
_OPERATION = re.compile(r"(\w+)Backward\d+")

# Operations that compute several gradients at once even if one is asked for (derivatives.yaml: formulas of several
# inputs without a mask; cuDNN's batch norm and RNN ignore theirs).
_JOINT = {
    *("CudnnBatchNorm", "CudnnRnn", "MiopenBatchNorm", "MiopenRnn", "MkldnnRnnLayer", "LstmMps"),
    *("ThnnFusedLstmCell", "ThnnFusedGruCell", "PreluKernel", "WeightNormInterface", "ConvTbc", "EuclideanDist"),
    *("Polar", "IndexReduce", "ScatterReduce", "GridSampler2DCpuFallback", "CudnnGridSampler"),
    *("LinalgHouseholderProduct", "FakeQuantizeLearnablePerTensorAffine", "FakeQuantizeLearnablePerChannelAffine"),
    *("EfficientAttention", "FlashAttention", "CudnnAttention", "ScaledDotProductCudnnAttention"),
    *("ScaledDotProductFlashAttention", "ScaledDotProductFlashAttentionForCpu"),
}
# Operations that pick rows of a weight by data that needs no gradient.
_LOOKUPS = {"Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "Take"}
_ELEMENTWISE = {"Add", "Sub", "Rsub", "Mul", "Div", "Pow"}

# Functions whose backward refuses to run for a part of the graph, or a graph that is kept.
_WHOLE = {
    "CompiledFunctionBackward": "a compiled graph computes all its gradients at once",
    "CheckpointFunctionBackward": "reentrant activation checkpointing runs whole backwards only",
}


@dataclass(slots=True)
class SplitPlan:
    """The two halves.

    Attributes:
        reasons: why some weights are early; empty where none is.
        whole: whether nothing can be left to W, so that a full backward it must be.
        ends: edges at which I's run ends: the inputs, the early weights, and the chain's last nodes.
        early: the leaves whose gradients are accumulated in I.
        weight_edges: for each chain node that has work in W, its weight edges.
        spent: nodes that have nothing left to do after I.
        groups: for each node behind a weight edge or root, the group it is in. Groups share no node and no leaf.
        group_bytes: for each group, the bytes of its weights.
        functions: the kinds of the chain's nodes that are not torch's own operations.
        packed: whether W may meet saved tensors that hooks packed.
    """

    reasons: list[str]
    whole: bool
    ends: list[GradientEdge]
    early: list[Tensor]
    weight_edges: dict[Node, list[WeightEdge]]
    spent: list[Node]
    groups: dict[Node, Node]
    group_bytes: dict[Node, int]
    functions: set[type]
    packed: bool


def plan_split(roots: Iterable[Node], inputs: Iterable[Tensor]) -> SplitPlan:
    """Divides the graph below `roots` (nodes). `inputs` are the stage's inputs, leaves of the graph."""
    edges = _children_first(roots)
    leaves = {node: node.variable for node in edges if type(node).__name__ == "AccumulateGrad"}
    wanted = {id(tensor) for tensor in inputs}
    targets = [node for node, leaf in leaves.items() if id(leaf) in wanted]
    chain = _leading_to(targets, edges) if targets else _depending_on_data(edges, leaves)

    groups = _Groups()
    for node, next_edges in edges.items():
        if node in leaves:
            groups.add(node)
        if node not in chain:
            groups.join(node, [child for child, _ in next_edges])
    weight_edges: dict[Node, list[WeightEdge]] = {}
    reasons: dict[Node, str] = {}
    refusals = []
    for node in chain:
        if type(node).__name__ in _WHOLE:
            refusals.append(_WHOLE[type(node).__name__])
        found = [
            (position, child, output)
            for position, (child, output) in enumerate(edges[node])
            if child is not None and child not in chain and child in groups
        ]
        if found:
            weight_edges[node] = found
            groups.merge([child for _, child, _ in found])
            if reason := _joint(node):
                reasons[node] = reason

    early = {groups.of(weight_edges[node][0][1]) for node in reasons}
    weight_edges = {node: found for node, found in weight_edges.items() if groups.of(found[0][1]) not in early}
    behind = {node: groups.of(node) for node in edges if node not in chain and node in groups}
    sizes: dict[Node, int] = {}
    for node, leaf in leaves.items():
        if node in behind:
            sizes[behind[node]] = sizes.get(behind[node], 0) + leaf.numel() * leaf.element_size()
    early_leaves = [node for node in leaves if behind.get(node) in early]
    last = [node for node in weight_edges if not any(child in chain for child, _ in edges[node])]
    return SplitPlan(
        reasons=list(dict.fromkeys([*refusals, *reasons.values()])),
        whole=bool(refusals) or not any(group not in early for group in behind.values()),
        ends=[GradientEdge(node, 0) for node in (*targets, *early_leaves, *last)],
        early=[leaves[node] for node in early_leaves],
        weight_edges=weight_edges,
        spent=[n for n in edges if (n in chain and n not in weight_edges) or behind.get(n) in early],
        groups={node: group for node, group in behind.items() if group not in early},
        group_bytes=sizes,
        functions={type(node) for node in chain if node not in leaves and _operation(node) is None},
        packed=any(packed(saved) for node in weight_edges for saved in saved_by(node)),
    )


class _Groups:
    """Nodes outside the chain, joined where they share a leaf or a chain node (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[Node, Node] = {}

    def __contains__(self, node: Node) -> bool:
        return node in self._parents

    def add(self, node: Node) -> None:
        self._parents[node] = node

    def of(self, node: Node) -> Node:
        parents = self._parents
        while (parent := parents[node]) is not node:
            parents[node] = node = parents[parent]
        return node

    def merge(self, nodes: list[Node]) -> None:
        first = self.of(nodes[0])
        for node in nodes[1:]:
            self._parents[self.of(node)] = first

    def join(self, node: Node, nodes: list[Node]) -> None:
        """Puts a node where those are that it leads to; one that leads to no leaf is in no group."""
        known = [other for other in nodes if other in self._parents]
        if known:
            self.merge(known)
            self._parents[node] = self.of(known[0])


def _children_first(roots: Iterable[Node]) -> dict[Node, Any]:
    """All nodes below `roots` and their edges, each node after those that its edges lead to."""
    edges: dict[Node, Any] = {}
    ordered: dict[Node, Any] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in ordered:
            stack.pop()
        elif node in edges:
            ordered[node] = edges[node]
            stack.pop()
        else:
            edges[node] = node.next_functions
            stack += [child for child, _ in edges[node] if child is not None and child not in edges]
    return ordered


def _leading_to(targets: list[Node], edges: dict[Node, Any]) -> set[Node]:
    chain = set(targets)
    for node, next_edges in edges.items():
        if any(child in chain for child, _ in next_edges):
            chain.add(node)
    return chain


def _depending_on_data(edges: dict[Node, Any], leaves: dict[Node, Tensor]) -> set[Node]:
    """Nodes that are no function of leaves alone, as far as a graph tells: data that needs no gradient has no node.

    A wrong guess moves work from one half to the other, and harms no gradient.
    """
    chain: set[Node] = set()
    for node, next_edges in edges.items():
        if node in leaves:
            continue
        operation = _operation(node)
        if (
            any(child in chain for child, _ in next_edges)
            or operation in _LOOKUPS
            or (any(child is None for child, _ in next_edges) and not _keeps_shape(node, operation, next_edges))
        ):
            chain.add(node)
    return chain


def _keeps_shape(node: Node, operation: str | None, next_edges: Any) -> bool:
    """Whether it is a weight's arithmetic with a constant."""
    if operation not in _ELEMENTWISE:
        return False
    shape = node._input_metadata[0].shape
    return any(child is not None and child._input_metadata[nr].shape == shape for child, nr in next_edges)


def _operation(node: Node) -> str | None:
    match = _OPERATION.fullmatch(type(node).__name__)
    return match[1] if match and not isinstance(node, BackwardCFunction) else None


def _joint(node: Node) -> str | None:
    """Why a node cannot compute the gradients of its weights apart, or None."""
    operation = _operation(node)
    if operation is None:
        name = type(node).__name__.removesuffix("Backward")
        return f"{name} computes all its gradients at once"
    if operation in _JOINT:
        return f"{operation} computes all its gradients at once"
    if any(packed_by_checkpoint(saved) for saved in saved_by(node)):
        return "what activation checkpointing recomputes can be had once only"
    return None
