"""Describes an autograd graph's structure by a key: graphs with equal keys are split in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pypipe.runtime.torch_private import AccumulateGrad

__all__ = ["AccumulateGrad", "Edge", "Graph", "Node", "Structure", "walk"]

Node = Any
Edge = tuple[int, int]  # the node that it leads to, or -1, and which output of that


@dataclass(slots=True)
class Graph:
    """All nodes below a backward's roots, numbered as they were found.

    Attributes:
        nodes: the nodes, by number.
        key: the roots' numbers, and each node's class and edges; of leaves, which input they are, if any. Equal keys
            mean equal structure. It holds no node.
    """

    nodes: list[Node]
    key: tuple[Any, ...]


def walk(roots: Iterable[Node], inputs: Iterable[Tensor]) -> Graph:
    """The graph below `roots` (nodes). This runs for every microbatch."""
    numbers_of_inputs = {id(tensor): i for i, tensor in enumerate(inputs)}
    nodes: list[Node] = []
    numbers: dict[Node, int] = {}
    key: list[Any] = []
    for root in roots:
        number = numbers.setdefault(root, len(nodes))
        if number == len(nodes):
            nodes.append(root)
        key.append(number)
    for node in nodes:  # which grows
        kind = type(node)
        key.append(kind)
        if kind is AccumulateGrad:
            which = numbers_of_inputs.get(id(node.variable))
            if which is not None:
                key.append(which)
            continue
        for child, output in node.next_functions:
            found = -1 if child is None else numbers.get(child)
            if found is None:
                found = numbers[child] = len(nodes)
                nodes.append(child)
            key.append(found)
            key.append(output)
    return Graph(nodes, tuple(key))


@dataclass(slots=True)
class Structure:
    """What a key says.

    Attributes:
        roots: the roots' numbers.
        kinds: each node's class.
        edges: each node's edges; of leaves none.
        inputs: the leaves that are inputs.
    """

    roots: list[int]
    kinds: list[type]
    edges: list[list[Edge]]
    inputs: list[int]

    @classmethod
    def of(cls, key: Sequence[Any]) -> Structure:
        """The structure that a key describes: numbers of the roots, then of each node its kind and its edges."""
        kinds: list[type] = []
        numbers: list[list[int]] = [[]]  # the roots', then each node's
        for entry in key:
            if isinstance(entry, type):
                kinds.append(entry)
                numbers.append([])
            else:
                numbers[-1].append(entry)
        leaf = [kind is AccumulateGrad for kind in kinds]
        return cls(
            roots=numbers[0],
            kinds=kinds,
            edges=[
                [] if is_leaf else list(zip(of_node[::2], of_node[1::2], strict=True))
                for is_leaf, of_node in zip(leaf, numbers[1:], strict=True)
            ],
            inputs=[node for node, is_leaf in enumerate(leaf) if is_leaf and numbers[1 + node]],
        )

    def children_first(self) -> list[int]:
        """All nodes, each after those that its edges lead to."""
        seen: set[int] = set()
        ordered: dict[int, None] = {}
        stack = list(self.roots)
        while stack:
            node = stack[-1]
            if node in ordered:
                stack.pop()
            elif node in seen:
                ordered[node] = None
                stack.pop()
            else:
                seen.add(node)
                stack += [child for child, _ in self.edges[node] if child >= 0 and child not in seen]
        return list(ordered)
