"""How a batch is cut and outputs are joined, as the user says it: chunk specs, one or a tree of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pypipe.runtime.torch_private import pytree

__all__ = ["Reduce", "Replicate", "TensorChunkSpec", "is_chunk_spec", "is_replicate", "other_dimensions"]


class TensorChunkSpec:
    """Cut a tensor (or join outputs) along one dimension.

    Args:
        split_dim: the dimension; negative ones count from the end.
    """

    def __init__(self, split_dim: int) -> None:
        self.split_dim = split_dim

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[int, ...]) -> tuple[TensorChunkSpec, ...]:
        """One spec for each positional argument."""
        return tuple(TensorChunkSpec(dim) for dim in chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: dict[str, int]) -> dict[str, TensorChunkSpec]:
        """One spec for each keyword argument."""
        return {name: TensorChunkSpec(dim) for name, dim in chunk_dims.items()}


class Replicate:
    """Give every microbatch the whole value; of outputs, take the last microbatch's."""

    def __repr__(self) -> str:
        return "Replicate()"


class Reduce:
    """Join outputs by folding them, microbatch by microbatch.

    Args:
        init_value: what to start from.
        reduce_fn: called with what there is so far and the next microbatch's value.
    """

    def __init__(self, init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> None:
        self.init_value = init_value
        self.reduce_fn = reduce_fn

    def __repr__(self) -> str:
        return f"Reduce({self.init_value!r}, {getattr(self.reduce_fn, '__name__', self.reduce_fn)})"


def is_replicate(spec: Any) -> bool:
    """Whether it is Replicate(), the class Replicate, or torch's own."""
    # torch.distributed.pipelining's own class is private, but scripts that use it should keep working.
    # They give the class as well as an object of it.
    kind = spec if isinstance(spec, type) else type(spec)
    return issubclass(kind, Replicate) or kind.__name__ == "_Replicate"


def is_chunk_spec(spec: Any) -> bool:
    """Whether it is one spec, and no tree of them; None and a number say a dimension."""
    return spec is None or isinstance(spec, int) or hasattr(spec, "split_dim") or is_replicate(spec)


def other_dimensions(*specs: Any) -> tuple[int, ...]:
    """The dimensions other than 0 that these trees of specs cut along, each once; negative ones as they are."""
    found: dict[int, None] = {}
    for leaf in pytree.tree_leaves(specs):
        dim = leaf if isinstance(leaf, int) else getattr(leaf, "split_dim", None)
        if isinstance(dim, int) and dim != 0:
            found[dim] = None
    return tuple(found)
