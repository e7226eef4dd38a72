"""The values of a batch, each kind with its way of being cut: tensors, nested tensors, block masks, and the rest."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pypipe.errors import InputError
from pypipe.runtime.autograd.engine import enter
from pypipe.runtime.batch.chunk_specs import is_replicate
from pypipe.runtime.batch.opaque import tensor_within
from pypipe.runtime.batch.structure import Path, path_text

__all__ = ["Leaf", "TensorLeaf", "as_leaf", "is_single"]


class Leaf:
    """A value that every microbatch gets whole. The other kinds derive from it.

    Attributes:
        value: the value.
        path: its place in the tree.
        dim: the dimension that it is cut along; None: it is not cut.
        given: whether a chunk spec says so; else it is cut along dimension 0 as all are, or given to all.
        own: whether that spec is for this value alone. Then it is cut by itself, whatever its length.
    """

    __slots__ = ("dim", "given", "own", "path", "value")

    def __init__(self, value: Any, path: Path, dim: int | None = None, given: bool = False, own: bool = False) -> None:
        self.value = value
        self.path = path
        self.dim = dim
        self.given = given
        self.own = own

    follows = False
    """Whether the pieces depend on the batch's cuts, though the value has no rows of its own."""

    @property
    def rows(self) -> int:
        """The length along the dimension that it is cut along."""
        raise TypeError("a value that every microbatch gets whole is not cut along a dimension")

    def length(self, dim: int) -> int | None:
        """The length along a dimension other than the one that it is cut along; None where there is no such one."""
        return None

    def text(self) -> str:
        """Name and shape, for messages."""
        return path_text(self.path)

    def piece(self, start: int, size: int) -> Any:
        """The rows from `start` on, alone."""
        return self.value

    def pieces(self, cuts: Sequence[int]) -> list[Any]:
        """All pieces, of these numbers of rows."""
        starts = itertools.accumulate(cuts, initial=0)
        return [self.piece(start, size) for start, size in zip(starts, cuts, strict=False)]


class TensorLeaf(Leaf):
    """A tensor that is cut along one dimension."""

    __slots__ = ()

    @property
    def rows(self) -> int:
        """The length along the dimension that it is cut along."""
        return int(self.value.shape[self.dim])

    def length(self, dim: int) -> int | None:
        """The length along another dimension; None where there is no such one."""
        n_dims = self.value.dim()
        if not -n_dims <= dim < n_dims or dim % n_dims == self.dim:
            return None
        return int(self.value.shape[dim])

    def text(self) -> str:
        """Name and shape."""
        return f"{path_text(self.path)} (shape {tuple(self.value.shape)})"

    def piece(self, start: int, size: int) -> Tensor:
        """A view of `size` rows from `start` on."""
        return _narrow(self.value, self.dim or 0, start, size)

    def pieces(self, cuts: Sequence[int]) -> list[Any]:
        """Views of all pieces; those of a plain tensor have no node and version of the whole."""
        if _is_plain(self.value):
            return [piece.data for piece in torch.split(self.value, list(cuts), self.dim or 0)]
        # One by one: pieces that split() makes share one node, which backward may walk only once.
        return super().pieces(cuts)


def _narrow(tensor: Tensor, dim: int, start: int, size: int) -> Tensor:
    piece = tensor.narrow(dim, start, size)
    return piece.data if _is_plain(tensor) else enter(piece)


def _is_plain(tensor: Tensor) -> bool:
    """Tells whether `.data` can replace enter(), in a tenth of the time: there is no gradient and no subclass."""
    return type(tensor) is Tensor and not tensor.requires_grad


class _NestedLeaf(Leaf):
    """A nested tensor (torch.nested), of either layout, whose rows are its components."""

    __slots__ = ("_starts",)

    def __init__(self, value: Any, path: Path, dim: int | None = None, given: bool = False, own: bool = False) -> None:
        super().__init__(value, path, dim, given, own)
        self._starts: list[int] | None = None

    @property
    def rows(self) -> int:
        """The length along the dimension that it is cut along."""
        return int(self.value.size(0))

    def text(self) -> str:
        return f"{path_text(self.path)} (a nested tensor of {self.rows} components)"

    def piece(self, start: int, size: int) -> Tensor:
        whole: Any = self.value
        if whole.layout != torch.jagged:
            components = list(whole.unbind())[start : start + size]
            made: Tensor = torch.nested.as_nested_tensor(components, layout=torch.strided)
            return made
        if self._starts is None:
            self._starts = whole.offsets().tolist()
        begin, end = self._starts[start], self._starts[start + size]
        ragged = int(whole._ragged_idx)
        offsets, lengths = _piece_of_offsets(whole.offsets(), start, size), whole.lengths()
        if lengths is not None:
            lengths = lengths[start : start + size]
        values = _narrow(whole.values(), ragged - 1, begin, end - begin)
        # The batch's, not the piece's: what a stage pads is as long as it is without a pipeline.
        jagged: Tensor = torch.nested.nested_tensor_from_jagged(
            values,
            offsets,
            lengths,
            jagged_dim=ragged,
            min_seqlen=whole._maybe_min_seqlen,
            max_seqlen=whole._maybe_max_seqlen,
        )
        return jagged


# Two nested tensors can be added only if their offsets are the same object: so the pieces of two with the same offsets
# have the same offsets again, be they arguments or the target.
_offsets: Any = WeakIdKeyDictionary()


def _piece_of_offsets(offsets: Tensor, start: int, size: int) -> Tensor:
    known: dict[tuple[int, int], Tensor] = _offsets.setdefault(offsets, {})
    found = known.get((start, size))
    if found is None:
        found = known[start, size] = offsets[start : start + size + 1] - offsets[start]
    return found


class _MaskLeaf(Leaf):
    """A BlockMask of flex_attention with a row for each of the batch's."""

    __slots__ = ()

    @property
    def rows(self) -> int:
        """The length along the dimension that it is cut along."""
        return int(self.value.kv_num_blocks.shape[0])

    def text(self) -> str:
        return f"{path_text(self.path)} (a BlockMask of shape {tuple(self.value.shape)})"

    def piece(self, start: int, size: int) -> Any:
        whole, rows = self.value, self.rows
        made = _shifted(whole, start)
        for name, tensor in vars(whole).items():
            # Its tensors have the batch in front; which ones there are depends on torch's version.
            if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.shape[0] == rows:
                setattr(made, name, tensor.narrow(0, start, size).data)
        return made


class _SharedMaskLeaf(Leaf):
    """A BlockMask of one row for all: every microbatch gets its blocks, but its mask_mod is asked for the batch's rows.

    Attention asks a mask_mod for the row that it works on, also where the blocks are those of one row.
    """

    __slots__ = ()

    follows = True

    def piece(self, start: int, size: int) -> Any:
        return _shifted(self.value, start)


def _shifted(mask: Any, start: int) -> Any:
    made = copy.copy(mask)
    # A tensor, not a number: a stage that torch.compile has compiled is not compiled again for each microbatch.
    made.mask_mod = _shifted_mod(mask.mask_mod, torch.tensor(start, dtype=torch.int32, device=mask.kv_indices.device))
    return made


def _shifted_mod(mask_mod: Callable[..., Any], start: Tensor) -> Callable[..., Any]:
    def shifted_mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b + start, h, q_idx, kv_idx)

    return shifted_mask_mod


def _is_block_mask(value: Any) -> bool:
    module = sys.modules.get("torch.nn.attention.flex_attention")  # importing it takes long; who has one, has it
    return module is not None and isinstance(value, module.BlockMask)


def is_single(value: Any) -> bool:
    """Whether it is one value to this module, though others may see a container in it."""
    return isinstance(value, Tensor) or _is_block_mask(value)


def as_leaf(value: Any, spec: Any, path: Path, *, own: bool) -> Leaf:
    """The kind of leaf that a value is.

    Args:
        value: not a container.
        spec: its chunk spec, or that of the container that it is in, or None.
        path: its place.
        own: whether the spec is for this value alone.

    Raises:
        InputError: the spec does not fit, or the value holds tensors and cannot be cut.
    """
    if is_replicate(spec):
        return Leaf(value, path, given=True)
    given = spec is not None
    if isinstance(value, Tensor):
        if value.is_nested:
            return _NestedLeaf(value, path, _first_dimension(spec, "a nested tensor", path), given, own and given)
        if spec is None and value.dim() == 0:
            return Leaf(value, path)
        if value.layout != torch.strided:
            raise InputError(
                f"{path_text(path)} is a tensor of layout {value.layout}, which cannot be cut into microbatches: give "
                "value.to_dense(), or Replicate() in its chunk spec if every microbatch is to have the whole"
            )
        return TensorLeaf(value, path, _dimension(spec, value, path), given, own and given)
    if _is_block_mask(value):
        if value.kv_num_blocks.dim() < 3 or value.kv_num_blocks.shape[0] == 1:
            return _SharedMaskLeaf(value, path)
        return _MaskLeaf(value, path, _first_dimension(spec, "a BlockMask", path), given, own and given)
    place = None if isinstance(value, _ORDINARY) else tensor_within(value)
    if place is not None:
        raise InputError(
            f"{path_text(path)} is a {type(value).__module__}.{type(value).__qualname__}, which holds a tensor "
            f"(at {path_text(path)}{place}) and cannot be cut into microbatches. Pass its tensors in a tuple, a dict, "
            "a NamedTuple or a dataclass, which are cut; or give it Replicate() in its chunk spec, and every "
            "microbatch gets the whole"
        )
    return Leaf(value, path)


_ORDINARY = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device, torch.nn.Module)


def _dimension(spec: Any, tensor: Tensor, path: Path) -> int:
    dim = _number(spec, path)
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(
            f"{path_text(path)} has {tensor.dim()} dimensions (shape {tuple(tensor.shape)}), so it cannot be cut along "
            f"dimension {dim}: change its chunk spec"
        )
    return dim % tensor.dim()


def _first_dimension(spec: Any, what: str, path: Path) -> int:
    dim = _number(spec, path)
    if dim != 0:
        raise InputError(
            f"{path_text(path)} is {what}, which is cut along dimension 0 and no other: its chunk spec says {dim}"
        )
    return dim


def _number(spec: Any, path: Path) -> int:
    dim = 0 if spec is None else spec if isinstance(spec, int) else getattr(spec, "split_dim", None)
    if not isinstance(dim, int):
        raise InputError(
            f"the chunk spec of {path_text(path)} is {spec!r}: use TensorChunkSpec(dim), Replicate() or None"
        )
    return dim
