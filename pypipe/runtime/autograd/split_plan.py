"""Divides an autograd graph into the input half of a backward (I) and its weight half (W).

A graph's *chain* is all nodes that lead to the stage's inputs. I runs the chain, W everything that branches off it: a
chain node's edge to a node outside the chain is a weight edge, and behind it there are only weights. In a stage whose
inputs need no gradient (the first), the chain is what depends on data, so that there, too, I runs through the stage and
W computes the weights' gradients.

Most nodes can compute the gradient of each edge separately. Those that can't (a custom autograd.Function, a fused
kernel, a node whose saved tensors are recomputed or unpacked) must do both halves at once. The weights behind them, and
those that share a node with these, are *early*: their gradients are computed and accumulated in I.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pypipe.runtime.autograd.node_kinds import ELEMENTWISE, LOOKUPS, VIEWS, NodeKind, kind_of
from pypipe.runtime.autograd.saved_tensors import Packed, names_of_saved, packed, without_weights
from pypipe.runtime.autograd.split_graph import Edge, Graph, Node, Structure

__all__ = ["Node", "SplitPlan", "SplitPlans", "WeightEdge", "WeightNode"]

# Position among a node's edges, the node behind it, which output of that; whether the gradient has that one's shape.
WeightEdge = tuple[int, int, int, bool]


@dataclass(slots=True)
class WeightNode:
    """A node of the chain that has work in W.

    Attributes:
        node: its number.
        group: the group of what is behind its weight edges.
        edges: its weight edges.
        made: whether a weight behind it was computed.
        operation: which of torch's operations it is, or None.
        saved: under which names it may have saved something that W is to free.
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
        whole: whether nothing can be left to W, so that the backward runs in one piece.
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
        """Tells whether the plan holds for a graph of the same structure."""
        for node, names, packing in self.packings:
            if packed(nodes[node], names) is not packing:
                return False
        return all(_keeps_shape(nodes[node]) is kept for node, kept in self.kept_shapes)


class SplitPlans:
    """The plans of a stage, whose microbatches make graphs of one structure, or of a few."""

    _most = 64

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], list[SplitPlan]] = {}
        self._count = 0

    def of(self, graph: Graph) -> SplitPlan:
        """Returns the graph's plan, a known one where that fits."""
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
    return _Planner(graph).plan()


class _Planner:
    """Makes the plan of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.structure = Structure.of(graph.key)
        self.edges = self.structure.edges
        self.kinds = [kind_of(kind) for kind in self.structure.kinds]
        self.order = self.structure.children_first()
        self.kept_shapes: dict[int, bool] = {}
        if self.structure.inputs:
            self.chain = _leading_to(self.structure.inputs, self.order, self.edges)
        else:
            self.chain = _depending_on_data(self.order, self.edges, self.kinds, self.nodes, self.kept_shapes)
        self.groups = self._grouped()
        self.weight_edges = self._find_weight_edges()
        self.saved = {node: names_of_saved(self.nodes[node], self.kinds[node].operation) for node in self.weight_edges}
        self.packings = {node: packed(self.nodes[node], names) for node, names in self.saved.items()}

    def plan(self) -> SplitPlan:
        structure, kinds = self.structure, self.kinds
        reasons = self._reasons()
        early = {self._group_behind(node) for node in reasons if node in self.weight_edges}
        late = {node: group for node in self.groups if (group := self.groups.of(node)) not in early}
        leaves = [node for node in self.groups if kinds[node].leaf]
        early_leaves = [leaf for leaf in leaves if leaf not in late]
        sizes: dict[int, int] = {}
        for leaf in leaves:
            if leaf in late:
                variable = self.nodes[leaf].variable
                sizes[late[leaf]] = sizes.get(late[leaf], 0) + variable.numel() * variable.element_size()
        weight_nodes = [self._weight_node(node) for node in self.weight_edges if self._group_behind(node) not in early]
        called = {each.node for each in weight_nodes}
        last = [each.node for each in weight_nodes if not self._leads_on(each.node)]
        return SplitPlan(
            packings=[(node, self.saved[node], packing) for node, packing in self.packings.items()],
            kept_shapes=list(self.kept_shapes.items()),
            reasons=list(dict.fromkeys(reasons.values())),
            whole=not sizes or any(kinds[node].whole is not None for node in reasons),
            ends=[*structure.inputs, *early_leaves, *last],
            early=early_leaves,
            weight_nodes=weight_nodes,
            spent={
                node: names_of_saved(self.nodes[node], kinds[node].operation)
                for node in self.order
                if kinds[node].saves and node not in called and node not in late
            },
            root_groups=[late.get(root) for root in structure.roots],
            group_bytes=sizes,
            functions={structure.kinds[node] for node in self.chain if kinds[node].function},
            packed=any(self.packings[node] is not Packed.NO for node in called),
        )

    def _grouped(self) -> _Groups:
        """The nodes outside the chain that lead to leaves."""
        groups = _Groups()
        for node in self.order:
            if node in self.chain:
                continue
            if self.kinds[node].leaf:
                groups.add(node)
            elif known := [child for child, _ in self.edges[node] if child in groups]:
                groups.add(node, known)
        return groups

    def _find_weight_edges(self) -> dict[int, list[WeightEdge]]:
        """The weight edges of each chain node that has some; what is behind one node's is one group from then on."""
        found: dict[int, list[WeightEdge]] = {}
        for node in self.order:
            if node in self.chain:
                exact = self.kinds[node].exact
                behind = [
                    (position, child, output, position in exact)
                    for position, (child, output) in enumerate(self.edges[node])
                    if child in self.groups
                ]
                if behind:
                    found[node] = behind
                    self.groups.join([child for _, child, _, _ in behind])
        return found

    def _leads_on(self, node: int) -> bool:
        """Whether the chain goes on behind a node."""
        return any(child in self.chain for child, _ in self.edges[node])

    def _group_behind(self, node: int) -> int:
        """The group of what is behind a chain node's weight edges."""
        return self.groups.of(self.weight_edges[node][0][1])

    def _reasons(self) -> dict[int, str]:
        """For chain nodes that must do both halves at once, why."""
        reasons: dict[int, str] = {}
        for node in self.order:
            kind = self.kinds[node]
            reason = kind.whole if node in self.chain else None
            if reason is None and node in self.weight_edges:
                by_checkpoint = self.packings[node] is Packed.BY_CHECKPOINT
                reason = "a checkpoint recomputes once only" if by_checkpoint else kind.joint
            if reason is not None:
                reasons[node] = reason
        return reasons

    def _weight_node(self, node: int) -> WeightNode:
        behind, operation = self.weight_edges[node], self.kinds[node].operation
        return WeightNode(
            node=node,
            group=self._group_behind(node),
            edges=behind,
            made=not all(_is_leaf(child, self.kinds, self.edges) for _, child, _, _ in behind),
            operation=operation,
            saved=without_weights(operation, self.saved[node], {position for position, _, _, _ in behind}),
        )


class _Groups:
    """Nodes outside the chain, by what they share: two that lead to one leaf are in one group (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def __contains__(self, node: int) -> bool:
        return node in self._parents

    def __iter__(self) -> Iterator[int]:
        return iter(self._parents)

    def add(self, node: int, children: Sequence[int] = ()) -> None:
        """Adds a node to the group that its children are in from now on; to one of its own, where it has none."""
        self._parents[node] = self.join(children) if children else node

    def of(self, node: int) -> int:
        """The number of a node's group: that of one of its nodes."""
        while (parent := self._parents[node]) != node:
            self._parents[node] = node = self._parents[parent]
        return node

    def join(self, nodes: Sequence[int]) -> int:
        """Makes one group of those that the nodes are in."""
        first = self.of(nodes[0])
        for node in nodes[1:]:
            self._parents[self.of(node)] = first
        return first


def _is_leaf(node: int, kinds: list[NodeKind], edges: list[list[Edge]]) -> bool:
    """Tells whether a node's output lies in the memory of a leaf."""
    while kinds[node].operation in VIEWS:
        node = edges[node][0][0]
    return kinds[node].leaf


def _leading_to(targets: list[int], order: list[int], edges: list[list[Edge]]) -> set[int]:
    chain = set(targets)
    for node in order:
        if any(child in chain for child, _ in edges[node]):
            chain.add(node)
    return chain


def _depending_on_data(
    order: list[int], edges: list[list[Edge]], kinds: list[NodeKind], nodes: list[Node], kept_shapes: dict[int, bool]
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
        data = operation in LOOKUPS or any(child in chain for child in children)
        if not data and -1 in children:
            if operation in ELEMENTWISE:
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
