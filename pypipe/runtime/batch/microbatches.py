"""Cutting a batch into microbatches.

Sizes are those of torch.tensor_split: a batch of N rows makes M microbatches of N // M rows, the first N % M of them
one row longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pypipe.errors import InputError
from pypipe.runtime.batch import offsets
from pypipe.runtime.batch.flattening import Rebuild, flatten
from pypipe.runtime.batch.leaves import Leaf, TensorLeaf
from pypipe.runtime.batch.rows_uncut import rows_within
from pypipe.runtime.batch.structure import class_text, path_keys, path_text

__all__ = ["Cuttable", "Origin", "Pieces", "sizes"]


def sizes(rows: int, n_microbatches: int) -> list[int]:
    """Rows of each microbatch: torch.tensor_split's."""
    share, longer = divmod(rows, n_microbatches)
    return [share + 1] * longer + [share] * (n_microbatches - longer)


@dataclass(frozen=True)
class Origin:
    """Which argument of step() a tree is, and what is known of all batches' trees.

    Args:
        name: the tree's name in error messages.
        names: what its items are called, where they have names: the first stage's positional arguments.
        harmless: paths of tensors that are called as offsets are and were found to hold none. Values are read once.
    """

    name: str
    names: Sequence[str] = ()
    harmless: set[str] = field(default_factory=set)

    @property
    def spec_argument(self) -> str:
        """The schedule's argument that its chunk specs are given in."""
        return f"{self.name}_chunk_spec"


class Cuttable:
    """A tree of tensors and other values, of which tensors are cut into microbatches and the rest is given to all.

    A leaf that has a chunk spec for itself alone is cut by itself, whatever its length: one row a microbatch, as many
    as the batch has, a multiple of that (cut in proportion), or any other number (as tensor_split cuts it). All others
    have one length, the batch's.

    Args:
        tree: arguments, keyword arguments or a target, of any nesting.
        spec: chunk specs of the same nesting, or a prefix of it, or None (dimension 0).
        origin: which tree it is, or only its name.

    Raises:
        InputError: a spec does not fit, or an object holds tensors and cannot be cut.
    """

    def __init__(self, tree: Any, spec: Any, origin: Origin | str) -> None:
        self._origin = Origin(origin) if isinstance(origin, str) else origin
        self._leaves, self._rebuild = flatten(tree, spec, self._origin.name)

    @property
    def name(self) -> str:
        """The tree's name in error messages."""
        return self._origin.name

    def whole(self) -> Any:
        """The tree itself, with what `replace` has put into it."""
        return self._rebuild([leaf.value for leaf in self._leaves])

    def replace(self, function: Callable[[Tensor], Tensor]) -> None:
        """Puts `function(tensor)`, of the same shape, in each tensor's place, where gradients will gather.

        Raises:
            InputError: a nested tensor requires a gradient.
        """
        for leaf in self._leaves:
            if isinstance(leaf.value, Tensor):
                if leaf.value.is_nested and leaf.value.requires_grad:  # torch cannot add to its `.grad`
                    raise InputError(
                        f"{leaf.text()} requires a gradient, which torch cannot add up over microbatches for nested "
                        "tensors: give its values and offsets as two tensors, or detach() it"
                    )
                leaf.value = function(leaf.value)

    def requiring_gradient(self) -> str | None:
        """Name and shape of the first tensor that requires a gradient; None where there is none."""
        found = (leaf for leaf in self._leaves if isinstance(leaf.value, Tensor) and leaf.value.requires_grad)
        return next((leaf.text() for leaf in found), None)

    def _reference(self, leaves: Iterable[Leaf], n_microbatches: int) -> Leaf | None:
        """The leaf whose length is the batch's; None where none is cut.

        It is the first ordinary one. A leaf with a spec of its own along dimension 0 was given that for its length, and
        one that has just M rows, by a spec of its own, has one for each microbatch.
        """
        cut = [leaf for leaf in leaves if leaf.dim is not None]
        likely = [leaf for leaf in cut if not (leaf.own and leaf.rows == n_microbatches)]
        for leaf in likely:
            if not leaf.own or leaf.dim != 0:
                return leaf
        return next(iter(likely or cut), None)

    def rows(self, n_microbatches: int = 0, beside: Cuttable | None = None) -> int:
        """The batch's length, which every leaf without a spec of its own has; 0 where none is cut.

        Args:
            n_microbatches: M.
            beside: another tree of the same batch.

        Raises:
            InputError: lengths differ.
        """
        if len(self._leaves) == 1 and beside is None:
            leaf = self._leaves[0]
            return 0 if leaf.dim is None else leaf.rows
        trees = (self,) if beside is None else (self, beside)
        leaves = [leaf for tree in trees for leaf in tree._leaves]
        first = self._reference(leaves, n_microbatches)
        if first is None:
            return 0
        rows = first.rows
        owner = next(tree for tree in trees if any(leaf is first for leaf in tree._leaves))
        for tree in trees:
            for leaf in tree._leaves:
                if leaf.dim is not None and not leaf.own and leaf.rows != rows:
                    raise owner._differing(first, leaf, tree)
        return rows

    def pieces(
        self, n_microbatches: int, *, batch_rows: int = 0, scaled: bool = False, others: Sequence[int] = ()
    ) -> Pieces:
        """One tree for each microbatch.

        Args:
            n_microbatches: M.
            batch_rows: rows of the batch where the first stage has told; 0: the tree's own length counts.
            scaled: whether a length that is a multiple of `batch_rows` is cut in proportion (a flattened target).
            others: the dimensions other than 0 that the batch's arguments are cut along. With one, it is no longer
                plain which rows a tensor without a chunk spec has in dimension 0: none is cut in proportion.

        Raises:
            InputError: fewer rows than microbatches, lengths that differ, cumulative offsets, or rows in what is no
                tensor.
        """
        if not batch_rows:
            batch_rows, others = self.rows(n_microbatches), ()
        if not batch_rows and not any(leaf.dim is not None for leaf in self._leaves):
            return Pieces(self._leaves, self._rebuild, [None] * len(self._leaves), n_microbatches)
        first: Leaf | None = None
        common: list[int] = []
        cuts: list[Sequence[int] | None] = []
        for leaf in self._leaves:
            if leaf.dim is None:
                if n_microbatches > 1 and not (leaf.given or leaf.follows):
                    self._require_no_rows(leaf, batch_rows)
                cuts.append(sizes(batch_rows, n_microbatches) if leaf.follows and n_microbatches > 1 else None)
                continue
            if leaf.own:
                cuts.append(self._cuts_of_its_own(leaf, n_microbatches, batch_rows))
                continue
            if others and not leaf.given:
                self._require_rows_in_front(leaf, batch_rows, others)
            if first is None:
                first, common = leaf, self._common_cuts(leaf, n_microbatches, batch_rows, scaled)
            elif leaf.rows != first.rows:
                raise self._differing(first, leaf)
            if n_microbatches > 1 and isinstance(leaf, TensorLeaf) and offsets.may_be_offsets(leaf.value):
                self._refuse_offsets(leaf)
            cuts.append(common)
        return Pieces(self._leaves, self._rebuild, cuts, n_microbatches)

    def _common_cuts(self, leaf: Leaf, n_microbatches: int, batch_rows: int, scaled: bool) -> list[int]:
        rows = leaf.rows
        if rows != batch_rows and not (scaled and batch_rows and rows % batch_rows == 0 and rows > 0):
            self._refuse_if_offsets(leaf, batch_rows)
            raise InputError(
                f"{leaf.text()} has {rows} rows, but the batch that the first stage got has {batch_rows}: give each "
                f"rank the same batch. {self._other_dimension(leaf, batch_rows)}A tensor that is not cut along the "
                f"batch gets Replicate() in {self._origin.spec_argument}"
            )
        if batch_rows < n_microbatches:
            raise self._too_short(batch_rows, n_microbatches)
        return [size * (rows // batch_rows) for size in sizes(batch_rows, n_microbatches)]

    def _require_no_rows(self, leaf: Leaf, batch_rows: int) -> None:
        """Raises InputError where a value that is not cut has as many rows as the batch."""
        found = rows_within(leaf.value, leaf.path, batch_rows, lists=self._origin.name == "target")
        if found is not None:
            raise InputError(
                f"{path_text(found.path)} is a {class_text(found.value)} of {batch_rows} values, as many "
                "as the batch has rows, but only tensors are cut into microbatches: make it a tensor "
                "(torch.as_tensor(...); for strings, of their indices). If each microbatch is to have the whole, give "
                f"it Replicate() in {self._origin.spec_argument}"
            )

    def _cuts_of_its_own(self, leaf: Leaf, n_microbatches: int, batch_rows: int) -> list[int]:
        rows = leaf.rows
        if rows < n_microbatches:
            if rows == batch_rows:
                raise self._too_short(rows, n_microbatches)
            raise InputError(
                f"{leaf.text()} has {rows} rows along dimension {leaf.dim}, which its chunk spec says to cut: too few "
                f"for {n_microbatches} microbatches. Give it one for each, or Replicate() in "
                f"{self._origin.spec_argument}"
            )
        if batch_rows >= n_microbatches and rows % batch_rows == 0:
            return [size * (rows // batch_rows) for size in sizes(batch_rows, n_microbatches)]
        return sizes(rows, n_microbatches)

    def _too_short(self, rows: int, n_microbatches: int) -> InputError:
        return InputError(
            f"{self.name} has {rows} rows, too few for {n_microbatches} microbatches: give a larger batch, or "
            f"n_microbatches <= {max(rows, 1)} to the schedule, or to step() on every rank"
        )

    def _require_rows_in_front(self, leaf: Leaf, batch_rows: int, others: Sequence[int]) -> None:
        """Raises InputError where dimension 0 may be another one than the batch's.

        A target of [sequence, batch] may be a multiple of the batch long, or even exactly as long, by accident.
        Whether it is, its shape cannot tell where the dimension that the arguments are cut along fits as well.
        """
        fitting = [dim for dim in others if leaf.length(dim) == batch_rows]
        if leaf.rows == batch_rows and not fitting:
            return
        along = " and ".join(str(dim) for dim in others)
        raise InputError(
            f"{leaf.text()} has {leaf.rows} rows along dimension 0, for a batch of {batch_rows} whose arguments are "
            f"cut along dimension {along}: say which dimension is cut, with {self._origin.spec_argument}="
            f"TensorChunkSpec({fitting[0] if fitting else 'dim'}), nested as the {self.name} is"
        )

    def _refuse_offsets(self, leaf: Leaf) -> None:
        """Raises InputError for what is called, and looks, as cumulative offsets do.

        There may be as many of them as the batch has rows: cut as rows, they would be silently wrong.
        """
        where = path_text(leaf.path)
        if where in self._origin.harmless:
            return
        keys, names = path_keys(leaf.path), self._origin.names
        if names and isinstance(keys[0], int) and keys[0] < len(names):
            keys[0] = names[keys[0]]
        if any(offsets.names_offsets(str(key)) for key in keys):
            self._refuse_if_offsets(leaf, leaf.rows)
        self._origin.harmless.add(where)

    def _refuse_if_offsets(self, leaf: Leaf, batch_rows: int) -> None:
        if not leaf.own and isinstance(leaf, TensorLeaf) and offsets.holds_offsets(leaf.value):
            what = f"{path_text(leaf.path)} has {leaf.rows} numbers, for a batch of {batch_rows} rows"
            raise InputError(offsets.advice(what, leaf.value, self._origin.spec_argument))

    def _other_dimension(self, leaf: Leaf, rows: int) -> str:
        for dim in range(leaf.value.dim() if isinstance(leaf, TensorLeaf) else 0):
            if leaf.length(dim) == rows:
                return (
                    f"If {path_text(leaf.path)} is to be cut along its dimension {dim}, which has {rows}, give it "
                    f"TensorChunkSpec({dim}) in {self._origin.spec_argument}. "
                )
        return ""

    def _differing(self, reference: Leaf, leaf: Leaf, beside: Cuttable | None = None) -> InputError:
        """The error for a leaf that is not as long as the batch. `beside`: the tree that it is of, if not of this."""
        tree = beside or self
        tree._refuse_if_offsets(leaf, reference.rows)
        self._refuse_if_offsets(reference, leaf.rows)
        arguments = dict.fromkeys([self._origin.spec_argument, tree._origin.spec_argument])
        return InputError(
            f"{reference.text()} has {reference.rows} rows, {leaf.text()} has {leaf.rows}: tensors of one batch have "
            f"one length. {tree._other_dimension(leaf, reference.rows) or self._other_dimension(reference, leaf.rows)}"
            f"One that is not cut along the batch gets Replicate() in {' or '.join(arguments)}"
        )

    def describe(self) -> str:
        """What is cut along which dimension: `args[0] (shape (4, 8)) along dimension 0`."""
        return ", ".join(f"{leaf.text()} along dimension {leaf.dim}" for leaf in self._leaves if leaf.dim is not None)


class Pieces(Sequence[Any]):
    """The microbatches' trees, each with tensors of its own.

    The first one that is asked for is made by itself, so that the pipeline need not wait for the others; they are made
    when the second one is asked for.
    """

    def __init__(
        self, leaves: Sequence[Leaf], rebuild: Rebuild, cuts: Sequence[Sequence[int] | None], n_microbatches: int
    ) -> None:
        self._leaves = leaves
        self._rebuild = rebuild
        self._cuts = cuts
        self._n_microbatches = n_microbatches
        self._first: tuple[int, Any] | None = None
        self._made: list[Any] | None = None

    def __len__(self) -> int:
        return self._n_microbatches

    def __getitem__(self, microbatch: Any) -> Any:
        if self._made is not None:
            return self._made[microbatch]
        count = self._n_microbatches
        microbatch = range(count)[microbatch]
        if self._first is None:
            cut = [
                leaf.value if cuts is None else leaf.piece(sum(cuts[:microbatch]), cuts[microbatch])
                for leaf, cuts in zip(self._leaves, self._cuts, strict=True)
            ]
            self._first = microbatch, self._rebuild(cut)
        number, first = self._first
        if microbatch == number:
            return first
        columns = [
            [leaf.value] * count if cuts is None else leaf.pieces(cuts)
            for leaf, cuts in zip(self._leaves, self._cuts, strict=True)
        ]
        rows = zip(*columns, strict=True) if columns else [()] * count
        self._made = [self._rebuild(list(row)) for row in rows]
        self._made[number] = first
        return self._made[microbatch]
