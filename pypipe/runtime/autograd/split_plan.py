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
from dataclasses import dataclass
from typing import Any

from torch.autograd.function import BackwardCFunction

from pypipe.runtime.autograd.saved_tensors import Packed, names_of_saved, packed, saves, without_weights
from pypipe.runtime.autograd.split_graph import AccumulateGrad, Edge, Graph, Node, Structure

__all__ = ["Node", "SplitPlan", "SplitPlans", "WeightEdge", "WeightNode"]

# Position among a node's edges, the node behind it, which output of that; whether the gradient has that one's shape.
WeightEdge = tuple[int, int, int, bool]

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
# Operations, and edges whose gradients never have to be summed up to the shape of what they are for.
_EXACT = {
    **dict.fromkeys(("Mm", "Bmm", "Embedding"), (0, 1)),
    **dict.fromkeys(("Addmm", "Baddbmm", "Convolution"), (1, 2)),
    **dict.fromkeys(("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm"), (1, 2)),
}
_VIEWS = {"T", "Transpose", "Permute", "View"}
_ELEMENTWISE = {"Add", "Sub", "Rsub", "Mul", "Div", "Pow"}

# Functions whose backward refuses to run for a part of the graph, or a graph that is kept.
_WHOLE = {
    "CompiledFunctionBackward": "a compiled graph computes all its gradients at once",
    "CheckpointFunctionBackward": "reentrant activation checkpointing runs whole backwards only",
}


@dataclass(slots=True)
class WeightNode:
    """A node of the chain that has work in W.

    Attributes:
        node: its number.
        group: the group of what is behind its weight edges.
        edges: its weight edges.
        made: whether a weight behind it was computed.
        operation: which of torch's operations it is, or None.
        saved: under which names it may have saved something that W shall free.
    """

    node: int
    group: int
    edges: list[WeightEdge]
    made: bool
    operation: str | None
    saved: tuple[str, ...]


@dataclass(slots=True)
class SplitPlan:
    """The two halves of every graph of one structure. It names nodes by number and holds none.

    Attributes:
        packings, kept_shapes: what else of a graph the plan depends on: for some nodes, what hooks did to what they
            saved; for others, whether they keep a shape.
        reasons: why some weights are early; empty where none is.
        whole: whether nothing can be left to W, so that a full backward it must be.
        ends: nodes at which I's run ends: the inputs, the early weights, and the chain's last nodes.
        early: the leaves whose gradients are accumulated in I.
        weight_nodes: the chain's nodes that have work in W.
        spent: nodes that have nothing left to do after I, and under which names they may have saved something.
        root_groups: for each root, its group if it is W's, else None.
        group_bytes: for each group of W, the bytes of its weights. Groups share no node and no leaf.
        functions: the kinds of the chain's nodes that are not torch's own operations.
        packed: whether W may meet saved tensors that hooks packed.
    """

    packings: list[tuple[int, tuple[str, ...], Packed]]
    kept_shapes: list[tuple[int, bool]]
    reasons: list[str]
    whole: bool
    ends: list[int]
    early: list[int]
    weight_nodes: list[WeightNode]
    spent: dict[int, tuple[str, ...]]
    root_groups: list[int | None]
    group_bytes: dict[int, int]
    functions: set[type]
    packed: bool

    def fits(self, nodes: list[Node]) -> bool:
        """Whether it holds for a graph of the same structure."""
        for node, names, packing in self.packings:
            if packed(nodes[node], names) is not packing:
                return False
        return all(_keeps_shape(nodes[node]) is kept for node, kept in self.kept_shapes)


class SplitPlans:
    """The plans of a stage: microbatch after microbatch makes graphs of one structure, or of few."""

    _most = 64

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], list[SplitPlan]] = {}
        self._count = 0

    def of(self, graph: Graph) -> SplitPlan:
        """How to divide the graph."""
        known = self._plans.get(graph.key, ())
        for plan in known:
            if plan.fits(graph.nodes):
                return plan
        if self._count >= self._most:
            self._plans.clear()
            self._count = 0
        made = _plan(graph)
        self._plans.setdefault(graph.key, []).append(made)
        self._count += 1
        return made


def _plan(graph: Graph) -> SplitPlan:
    nodes, structure = graph.nodes, Structure.of(graph.key)
    edges = structure.edges
    kinds = [_kinds.get(kind) or _kind(kind) for kind in structure.kinds]
    order = structure.children_first()
    kept_shapes: dict[int, bool] = {}
    if structure.inputs:
        chain = _leading_to(structure.inputs, order, edges)
    else:
        chain = _depending_on_data(order, edges, kinds, nodes, kept_shapes)

    groups: dict[int, int] = {}  # of nodes outside the chain: a tree to each group's root (union-find)
    found: dict[int, list[WeightEdge]] = {}
    reasons: dict[int, str] = {}
    packings: dict[int, Packed] = {}
    saved: dict[int, tuple[str, ...]] = {}
    for node in order:
        kind = kinds[node]
        if kind.leaf:
            if node not in chain:
                groups[node] = node
        elif node not in chain:
            known = [child for child, _ in edges[node] if child in groups]
            if known:  # what leads to no leaf is in no group
                groups[node] = _merged(groups, known)
        else:
            if kind.whole is not None:
                reasons[node] = kind.whole
            exact = _EXACT.get(kind.operation or "", ())
            behind = [
                (i, child, output, i in exact) for i, (child, output) in enumerate(edges[node]) if child in groups
            ]
            if behind:
                found[node] = behind
                _merged(groups, [child for _, child, _, _ in behind])
                saved[node] = names_of_saved(nodes[node], kind.operation)
                packings[node] = packing = packed(nodes[node], saved[node])
                reason = kind.joint if packing is not Packed.BY_CHECKPOINT else "a checkpoint recomputes once only"
                if reason is not None:
                    reasons.setdefault(node, reason)

    early = {_group(groups, found[node][0][1]) for node in reasons if node in found}
    weight_nodes = []
    for node, behind in found.items():
        group = _group(groups, behind[0][1])
        if group not in early:
            made = not all(_is_leaf(child, kinds, edges) for _, child, _, _ in behind)
            operation, positions = kinds[node].operation, {position for position, _, _, _ in behind}
            names = without_weights(operation, saved[node], positions)
            weight_nodes.append(WeightNode(node, group, behind, made, operation, names))
    late: dict[int, int] = {}
    sizes: dict[int, int] = {}
    early_leaves = []
    for node in groups:
        group = _group(groups, node)
        if group not in early:
            late[node] = group
            if kinds[node].leaf:
                leaf = nodes[node].variable
                sizes[group] = sizes.get(group, 0) + leaf.numel() * leaf.element_size()
        elif kinds[node].leaf:
            early_leaves.append(node)
    called = {each.node for each in weight_nodes}
    last = [each.node for each in weight_nodes if not any(child in chain for child, _ in edges[each.node])]
    return SplitPlan(
        packings=[(node, saved[node], packing) for node, packing in packings.items()],
        kept_shapes=list(kept_shapes.items()),
        reasons=list(dict.fromkeys(reasons.values())),
        whole=not sizes or any(kinds[node].whole is not None for node in reasons),
        ends=[*structure.inputs, *early_leaves, *last],
        early=early_leaves,
        weight_nodes=weight_nodes,
        spent={
            node: names_of_saved(nodes[node], kinds[node].operation)
            for node in order
            if kinds[node].saves and node not in called and node not in late
        },
        root_groups=[late.get(root) for root in structure.roots],
        group_bytes=sizes,
        functions={structure.kinds[node] for node in chain if kinds[node].function},
        packed=any(packings[node] is not Packed.NO for node in called),
    )


@dataclass(slots=True)
class _Kind:
    """What a node's class tells.

    Attributes:
        leaf: whether such a node adds to a leaf's `.grad`.
        operation: which of torch's operations it is, or None.
        joint: why it cannot compute the gradients of its weights apart, or None.
        whole: why it can be run by full backwards only, or None.
        saves: whether it may save tensors.
    """

    leaf: bool
    operation: str | None
    joint: str | None
    whole: str | None
    saves: bool

    @property
    def function(self) -> bool:
        return self.operation is None and not self.leaf


_kinds: dict[type, _Kind] = {}


def _kind(kind: type) -> _Kind:
    match = _OPERATION.fullmatch(kind.__name__)
    operation = match[1] if match and not issubclass(kind, BackwardCFunction) else None
    joint = None
    if operation is None or operation in _JOINT:
        joint = f"{operation or kind.__name__.removesuffix('Backward')} computes all its gradients at once"
    made = _kinds[kind] = _Kind(
        leaf=kind is AccumulateGrad,
        operation=operation,
        joint=joint,
        whole=_WHOLE.get(kind.__name__),
        saves=saves(kind),
    )
    return made


def _is_leaf(node: int, kinds: list[_Kind], edges: list[list[Edge]]) -> bool:
    """Whether what comes from a node has the memory of a leaf."""
    while kinds[node].operation in _VIEWS:
        node = edges[node][0][0]
    return kinds[node].leaf


def _group(groups: dict[int, int], node: int) -> int:
    while (parent := groups[node]) != node:
        groups[node] = node = groups[parent]
    return node


def _merged(groups: dict[int, int], nodes: list[int]) -> int:
    first = _group(groups, nodes[0])
    for node in nodes[1:]:
        groups[_group(groups, node)] = first
    return first


def _leading_to(targets: list[int], order: list[int], edges: list[list[Edge]]) -> set[int]:
    chain = set(targets)
    for node in order:
        if any(child in chain for child, _ in edges[node]):
            chain.add(node)
    return chain


def _depending_on_data(
    order: list[int], edges: list[list[Edge]], kinds: list[_Kind], nodes: list[Node], kept_shapes: dict[int, bool]
) -> set[int]:
    """Nodes that are no function of leaves alone, as far as a graph tells: data that needs no gradient has no node.

    A wrong guess moves work from one half to the other, and harms no gradient. `kept_shapes` notes which shapes were
    looked at.
    """
    chain: set[int] = set()
    for node in order:
        if kinds[node].leaf:
            continue
        operation = kinds[node].operation
        children = [child for child, _ in edges[node]]
        data = operation in _LOOKUPS or any(child in chain for child in children)
        if not data and -1 in children:
            if operation in _ELEMENTWISE:
                kept_shapes[node] = _keeps_shape(nodes[node])
            data = not kept_shapes.get(node, False)
        if data:
            chain.add(node)
    return chain


def _keeps_shape(node: Node) -> bool:
    """Whether an elementwise operation only changes a weight's values: it computes with a constant."""
    shape = node._input_metadata[0].shape
    return any(
        child is not None and child._input_metadata[output].shape == shape for child, output in node.next_functions
    )
