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

from pypipe.runtime.saved import Packed, packed, saves

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
_VIEWS = {"T", "Transpose", "Permute", "View"}
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
        weight_edges: for each chain node that has work in W, its weight edges, and the group of what is behind them.
            Groups share no node and no leaf.
        made_weights: for nodes of `weight_edges` behind which a weight was computed, which operation they are.
        spent: nodes that may have saved something, and have nothing left to do after I.
        late: the groups of nodes of W.
        group_bytes: for each group of W, the bytes of its weights.
        functions: the kinds of the chain's nodes that are not torch's own operations.
        packed: whether W may meet saved tensors that hooks packed.
    """

    reasons: list[str]
    whole: bool
    ends: list[GradientEdge]
    early: list[Tensor]
    weight_edges: dict[Node, tuple[Node, list[WeightEdge]]]
    made_weights: dict[Node, str | None]
    spent: list[Node]
    late: dict[Node, Node]
    group_bytes: dict[Node, int]
    functions: set[type]
    packed: bool


def plan_split(roots: Iterable[Node], inputs: Iterable[Tensor]) -> SplitPlan:
    """Divides the graph below `roots` (nodes). `inputs` are the stage's inputs, leaves of the graph."""
    edges = _children_first(roots)
    kinds = {node: _kinds.get(type(node)) or _kind(type(node)) for node in edges}
    leaves = {node: node.variable for node, kind in kinds.items() if kind.leaf}
    wanted = {id(tensor) for tensor in inputs}
    targets = [node for node, leaf in leaves.items() if id(leaf) in wanted]
    chain = _leading_to(targets, edges) if targets else _depending_on_data(edges, kinds)

    groups: dict[Node, Node] = {}  # of nodes outside the chain: a tree to each group's root (union-find)
    found: dict[Node, list[WeightEdge]] = {}
    reasons: dict[Node, str] = {}
    hooked = []
    for node, next_edges in edges.items():
        kind = kinds[node]
        if kind.leaf:
            if node not in chain:
                groups[node] = node
        elif node not in chain:
            known = [child for child, _ in next_edges if child in groups]
            if known:  # what leads to no leaf is in no group
                groups[node] = _merged(groups, known)
        else:
            if kind.whole is not None:
                reasons[node] = kind.whole
            behind = [(i, child, output) for i, (child, output) in enumerate(next_edges) if child in groups]
            if behind:
                found[node] = behind
                _merged(groups, [child for _, child, _ in behind])
                packing = packed(node)
                if packing is not Packed.NO:
                    hooked.append(node)
                reason = kind.joint if packing is not Packed.BY_CHECKPOINT else "a checkpoint recomputes once only"
                if reason is not None:
                    reasons.setdefault(node, reason)

    early = {_group(groups, found[node][0][1]) for node in reasons if node in found}
    weight_edges = {}
    made_weights = {}
    for node, behind in found.items():
        group = _group(groups, behind[0][1])
        if group not in early:
            weight_edges[node] = (group, behind)
            if not all(_is_leaf(child, kinds, edges) for _, child, _ in behind):
                made_weights[node] = kinds[node].operation
    late: dict[Node, Node] = {}
    sizes: dict[Node, int] = {}
    early_leaves = []
    for node in groups:
        group = _group(groups, node)
        if group not in early:
            late[node] = group
            if kinds[node].leaf:
                sizes[group] = sizes.get(group, 0) + leaves[node].numel() * leaves[node].element_size()
        elif kinds[node].leaf:
            early_leaves.append(node)
    last = [node for node in weight_edges if not any(child in chain for child, _ in edges[node])]
    return SplitPlan(
        reasons=list(dict.fromkeys(reasons.values())),
        whole=not sizes or any(kinds[node].whole is not None for node in reasons),
        ends=[GradientEdge(node, 0) for node in (*targets, *early_leaves, *last)],
        early=[leaves[node] for node in early_leaves],
        weight_edges=weight_edges,
        made_weights=made_weights,
        spent=[node for node, kind in kinds.items() if kind.saves and node not in weight_edges and node not in late],
        late=late,
        group_bytes=sizes,
        functions={type(node) for node, kind in kinds.items() if kind.function and node in chain},
        packed=any(node in weight_edges for node in hooked),
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
        leaf=kind.__name__ == "AccumulateGrad",
        operation=operation,
        joint=joint,
        whole=_WHOLE.get(kind.__name__),
        saves=saves(kind),
    )
    return made


def _is_leaf(node: Node, kinds: dict[Node, _Kind], edges: dict[Node, Any]) -> bool:
    """Whether what comes from a node has the memory of a leaf."""
    while kinds[node].operation in _VIEWS:
        node = edges[node][0][0]
    return kinds[node].leaf


def _group(groups: dict[Node, Node], node: Node) -> Node:
    while (parent := groups[node]) is not node:
        groups[node] = node = groups[parent]
    return node


def _merged(groups: dict[Node, Node], nodes: list[Node]) -> Node:
    first = _group(groups, nodes[0])
    for node in nodes[1:]:
        groups[_group(groups, node)] = first
    return first


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
        for child, _ in next_edges:
            if child in chain:
                chain.add(node)
                break
    return chain


def _depending_on_data(edges: dict[Node, Any], kinds: dict[Node, _Kind]) -> set[Node]:
    """Nodes that are no function of leaves alone, as far as a graph tells: data that needs no gradient has no node.

    A wrong guess moves work from one half to the other, and harms no gradient.
    """
    chain: set[Node] = set()
    for node, next_edges in edges.items():
        if kinds[node].leaf:
            continue
        operation = kinds[node].operation
        children = [child for child, _ in next_edges]
        if (
            operation in _LOOKUPS
            or any(child in chain for child in children)
            or (None in children and not (operation in _ELEMENTWISE and _keeps_shape(node, next_edges)))
        ):
            chain.add(node)
    return chain


def _keeps_shape(node: Node, next_edges: Any) -> bool:
    """Whether an elementwise operation only changes a weight's values: it computes with a constant."""
    shape = node._input_metadata[0].shape
    return any(child is not None and child._input_metadata[output].shape == shape for child, output in next_edges)
