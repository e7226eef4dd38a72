"""The loss function's keyword arguments: given whole to every microbatch, unless a chunk spec says how to cut them.

Most of them are no part of the batch (class weights, a temperature), and nothing tells a value of each row from one
that has as many numbers by accident. Whole, the former would be broadcast against a microbatch; cut, the latter. So
what is as long as the batch needs a chunk spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pypipe.errors import InputError
from pypipe.runtime.batch.chunk_specs import is_chunk_spec
from pypipe.runtime.batch.microbatches import Cuttable, Origin, Pieces
from pypipe.runtime.batch.rows_uncut import rows_within
from pypipe.runtime.batch.structure import class_text, path_text
from pypipe.runtime.torch_private import pytree

__all__ = ["LossOptions"]

_ORIGIN = Origin("loss_kwargs")


class LossOptions:
    """One step's.

    Args:
        options: by name.
        spec: a chunk spec for all of them, or a dict of those of some; None: none has one.
        n_microbatches: M.

    Raises:
        InputError: a spec does not fit.
    """

    def __init__(self, options: Mapping[str, Any], spec: Any, n_microbatches: int) -> None:
        if not (is_chunk_spec(spec) or isinstance(spec, dict)):
            raise InputError(
                f"loss_kwargs_chunk_spec is {spec!r}: give a dict of TensorChunkSpec(dim) or Replicate() by name"
            )
        specs = spec if isinstance(spec, dict) else dict.fromkeys(options if spec is not None else (), spec)
        specs = {name: its for name, its in specs.items() if its is not None and name in options}
        self._whole = {name: value for name, value in options.items() if name not in specs}
        self._n_microbatches = n_microbatches
        self._given = Cuttable({name: options[name] for name in specs}, specs, _ORIGIN)
        self._pieces: Pieces | None = None
        self._is_new = True

    def requiring_gradient(self) -> str | None:
        """The name and shape of a tensor that requires a gradient; None where there is none."""
        found = self._given.requiring_gradient()
        for name, value in self._whole.items():
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    return f"loss_kwargs[{name!r}] (shape {tuple(leaf.shape)})"
        return found

    def replace(self, function: Callable[[Tensor], Tensor]) -> None:
        """Puts `function(tensor)` in the place of each tensor that is cut."""
        self._given.replace(function)

    def of(self, microbatch: int, rows: int, others: Sequence[int]) -> dict[str, Any]:
        """A microbatch's.

        Args:
            microbatch: which one.
            rows: the batch's length; 0: unknown.
            others: the dimensions other than 0 that the batch's arguments are cut along.

        Raises:
            InputError: something is as long as the batch and has no chunk spec.
        """
        if self._is_new and rows and self._n_microbatches > 1:
            self._require_no_rows(rows, others)
        self._is_new = False
        if self._pieces is None:
            self._pieces = self._given.pieces(self._n_microbatches, batch_rows=rows, scaled=True)
        cut: dict[str, Any] = self._pieces[microbatch]
        return {**self._whole, **cut}

    def _require_no_rows(self, rows: int, others: Sequence[int]) -> None:
        for name, value in self._whole.items():
            found = rows_within(value, ((_ORIGIN.name,), "[", name), rows, lists=True, dims=(0, *others))
            if found is None:
                continue
            what, cut = class_text(found.value), "make it a tensor with TensorChunkSpec(0)"
            if isinstance(found.value, Tensor):
                what, cut = f"tensor of shape {tuple(found.value.shape)}", "TensorChunkSpec(0) cuts it as the target is"
            raise InputError(
                f"{path_text(found.path)} is a {what}, which is as long as the batch, of {rows} rows: say whether each "
                "microbatch is to have its own rows of it or the whole, with "
                f"{_ORIGIN.spec_argument}={{{name!r}: ...}}: {cut}, Replicate() gives the whole to every microbatch"
            )
