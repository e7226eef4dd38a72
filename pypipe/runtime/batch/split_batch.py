"""A batch that comes cut into microbatches already, which may differ in length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pypipe.errors import InputError
from pypipe.runtime.batch.batch import Batch, ChunkSpecs, Share
from pypipe.runtime.batch.microbatches import Cuttable, Origin

__all__ = ["SplitBatch", "count_microbatches"]

Microbatches = Sequence[Any] | None


def count_microbatches(arg_mbs: Microbatches, kwarg_mbs: Microbatches, target_mbs: Microbatches) -> int | None:
    """How many microbatches a step was given; None if it was given none.

    Raises:
        InputError: they are not lists of one length, or not of what they are to hold.
    """
    given = {"arg_mbs": (arg_mbs, tuple), "kwarg_mbs": (kwarg_mbs, dict), "target_mbs": (target_mbs, None)}
    lengths: dict[str, int] = {}
    for name, (values, kind) in given.items():
        if values is None:
            continue
        if not isinstance(values, (list, tuple)):
            raise InputError(f"{name} is a {type(values).__name__}: give a list with one entry for each microbatch")
        for number, value in enumerate(values if kind is not None else ()):
            if not isinstance(value, kind or object):
                what = "tuple of positional arguments" if kind is tuple else "dict of keyword arguments"
                raise InputError(f"{name}[{number}] is a {type(value).__name__}: give a {what}")
        lengths[name] = len(values)
    if not lengths:
        return None
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise InputError(f"the microbatches of one step are as many in each list, but {listed}")
    count = next(iter(lengths.values()))
    if not count:
        raise InputError(f"{next(iter(lengths))} is empty: give 1 microbatch or more")
    return count


class SplitBatch(Batch):
    """What step() or eval() was given on one rank, microbatch by microbatch.

    Args:
        arg_mbs, kwarg_mbs, target_mbs: one entry for each microbatch, or None; `arg_mbs` are ignored unless this is the
            first stage.
        specs: which dimension of a tensor its rows are counted along; whole loss_kwargs only.
        n_microbatches: M.
        first: whether this rank holds the first stage.
        training: whether gradients are wanted.
        loss_kwargs: of the loss function, which gets them whole.
        two_copies: as for Batch.

    Raises:
        InputError: something cannot be used.
    """

    merges = False

    def __init__(
        self,
        arg_mbs: Microbatches,
        kwarg_mbs: Microbatches,
        target_mbs: Microbatches,
        specs: ChunkSpecs,
        n_microbatches: int,
        *,
        first: bool,
        training: bool,
        two_copies: bool = False,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if loss_kwargs and specs.loss_kwargs is not None:
            raise InputError("loss_kwargs_chunk_spec cuts whole batches: leave it out where microbatches are given")
        super().__init__((), {}, None, ChunkSpecs(output=specs.output), n_microbatches, first=False, training=False)
        self._whole_options = loss_kwargs or {}
        self._split_args = _trees("arg_mbs", arg_mbs if first else None, specs.args, specs.names)
        self._split_kwargs = _trees("kwarg_mbs", kwarg_mbs, specs.kwargs)
        self._split_targets = _trees("target_mbs", target_mbs, specs.target)
        if training:
            for tree in (*self._split_args, *self._split_kwargs, *self._split_targets):
                self._enter_all(tree, two_copies=two_copies)
        self._sizes = []
        if first:
            trees = [each for each in (self._split_args, self._split_kwargs) if each]
            self._sizes = [_rows(*(each[n] for each in trees)) for n in range(n_microbatches)]
            self.rows = _total(self._sizes, "arg_mbs" if arg_mbs else "kwarg_mbs")

    def share(self, microbatch: int) -> Share:
        """On the first stage: this microbatch's rows."""
        return Share(self._sizes[microbatch], self.rows)

    def args(self, microbatch: int) -> tuple[Any, ...]:
        """On the first stage: this microbatch's positional arguments."""
        args: tuple[Any, ...] = self._split_args[microbatch].whole() if self._split_args else ()
        return args

    def kwargs(self, microbatch: int, share: Share) -> dict[str, Any]:
        """This microbatch's keyword arguments."""
        kwargs: dict[str, Any] = self._split_kwargs[microbatch].whole() if self._split_kwargs else {}
        return kwargs

    def target(self, microbatch: int, share: Share) -> Any:
        """This microbatch's target."""
        if not self._split_targets:
            return None
        tree = self._split_targets[microbatch]
        rows = tree.rows()
        if share.batch_rows and rows and rows % share.rows:
            raise InputError(
                f"{tree.name} has {rows} rows, but microbatch {microbatch} of the first stage has {share.rows}: give "
                "each rank the same microbatches"
            )
        return tree.whole()

    def loss_kwargs(self, microbatch: int, share: Share) -> dict[str, Any]:
        """The keyword arguments of the loss function."""
        return self._whole_options

    def weight(self, microbatch: int, share: Share) -> float:
        """This microbatch's share of a mean over the whole batch."""
        if share.batch_rows:
            return share.rows / share.batch_rows
        sizes = [tree.rows() for tree in self._split_targets]
        total = _total(sizes, "target_mbs")
        return sizes[microbatch] / total if total else 1 / self._n_microbatches

    def describe(self) -> str:
        """Nothing: nothing is cut."""
        return ""


def _trees(name: str, values: Microbatches, spec: Any, names: Sequence[str] = ()) -> list[Cuttable]:
    return [Cuttable(value, spec, Origin(f"{name}[{n}]", names)) for n, value in enumerate(values or ())]


def _rows(first: Cuttable | None = None, beside: Cuttable | None = None) -> int:
    """The rows of one microbatch's arguments and keyword arguments."""
    return first.rows(beside=beside) if first is not None else 0


def _total(sizes: Sequence[int], name: str) -> int:
    """The rows of all microbatches; 0 if none of them has any.

    Raises:
        InputError: some have rows and some have none: their weights in the mean are not known.
    """
    if any(sizes) and not all(sizes):
        raise InputError(
            f"{name}[{sizes.index(0)}] has no rows, and others have: a microbatch counts by its rows, so give each 1 "
            "or more, or build the schedule with scale_grads=False"
        )
    return sum(sizes)
