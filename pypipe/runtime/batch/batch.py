"""One step's data on one rank: arguments and target, cut into microbatches as soon as the batch's length is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from pypipe.errors import InputError
from pypipe.runtime.autograd.engine import run_backward
from pypipe.runtime.batch.chunk_specs import other_dimensions
from pypipe.runtime.batch.loss_options import LossOptions
from pypipe.runtime.batch.microbatches import Cuttable, Origin, Pieces, sizes

__all__ = ["Batch", "ChunkSpecs", "Share"]


@dataclass(frozen=True)
class ChunkSpecs:
    """How a schedule cuts arguments and target and joins outputs; None: along dimension 0.

    Attributes:
        names: what the first stage calls its positional arguments, where it is known.
        others: the dimensions other than 0 that arguments are cut along. The rank that has the target need not have
            the arguments; their chunk specs it has.
    """

    args: Any = None
    kwargs: Any = None
    output: Any = None
    target: Any = None
    loss_kwargs: Any = None
    names: Sequence[str] = ()
    others: tuple[int, ...] = field(init=False)
    origins: tuple[Origin, Origin, Origin] = field(init=False)

    def __post_init__(self) -> None:
        origins = (Origin("args", self.names), Origin("kwargs"), Origin("target"))
        object.__setattr__(self, "origins", origins)
        object.__setattr__(self, "others", other_dimensions(self.args, self.kwargs))

    def describe(self) -> str:
        """Lists the specs that were given, as arguments of the schedule."""
        given = {
            "args_chunk_spec": self.args,
            "kwargs_chunk_spec": self.kwargs,
            "target_chunk_spec": self.target,
            "loss_kwargs_chunk_spec": self.loss_kwargs,
            "output_merge_spec": self.output,
        }
        return "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)


class Share(NamedTuple):
    """A microbatch's part of the batch, in rows; zeros where the batch has no rows."""

    rows: int
    batch_rows: int


class _Entrance:
    """A batch tensor that has a graph behind it, made a leaf for the length of a step.

    Each microbatch runs its own backward, but a graph that they share can be walked only once. So gradients gather at
    the leaf, and the graph behind it is walked at the end of the step.
    """

    __slots__ = ("leaf", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.leaf = tensor.detach().requires_grad_()


class Batch:
    """What step() or eval() was given on one rank.

    Args:
        args, kwargs: the stage's arguments; `args` are ignored unless this is the first stage.
        target: what the loss function gets, or None.
        specs: how to cut them.
        n_microbatches: M.
        first: whether this rank holds the first stage, whose arguments tell the batch's length.
        training: whether gradients are wanted.
        loss_kwargs: of the loss function.
        two_copies: whether two ranks have parts of the microbatches, so that no gradient of the batch is whole.

    Raises:
        InputError: something cannot be cut, or requires a gradient with two copies.

    Attributes:
        rows: the batch's length, where the first stage is; 0: elsewhere, and where it has none.
        merges: whether the outputs of its microbatches are merged.
    """

    merges = True

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        specs: ChunkSpecs,
        n_microbatches: int,
        *,
        first: bool,
        training: bool,
        two_copies: bool = False,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.merge_spec = specs.output
        self._n_microbatches = n_microbatches
        self._others = specs.others
        of_args, of_kwargs, of_target = specs.origins
        self._args = Cuttable(args if first else (), specs.args if first else None, of_args)
        self._kwargs = Cuttable(kwargs, specs.kwargs, of_kwargs) if kwargs else None
        self._target = Cuttable(target, specs.target if target is not None else None, of_target)
        self._options = LossOptions(loss_kwargs, specs.loss_kwargs, n_microbatches) if loss_kwargs else None
        self._entrances: list[_Entrance] = []
        if training:
            for each in (self._args, self._kwargs, self._target, self._options):
                if each is not None:
                    self._enter_all(each, two_copies=two_copies)
        self._arg_pieces: Pieces | None = None
        self._kwarg_pieces: Pieces | None = None
        self._target_pieces: Pieces | None = None
        self.rows = 0
        if first:
            self.rows = self._args.rows(n_microbatches, beside=self._kwargs)
            self._arg_pieces = self._args.pieces(n_microbatches, batch_rows=self.rows)
            self._sizes = sizes(self.rows, n_microbatches)

    def _enter_all(self, tree: Cuttable | LossOptions, *, two_copies: bool) -> None:
        """Makes leaves of a tree's tensors that require gradients."""
        if two_copies and (what := tree.requiring_gradient()) is not None:
            raise InputError(
                f"{what} requires a gradient. Both ends of a schedule of two model copies would get that of their own "
                "microbatches only: compute it within a stage, detach() it, or use ScheduleDualPipeV"
            )
        tree.replace(self._enter)

    def _enter(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        entrance = _Entrance(tensor)
        self._entrances.append(entrance)
        return entrance.leaf

    def share(self, microbatch: int) -> Share:
        """On the first stage: this microbatch's rows."""
        return Share(self._sizes[microbatch], self.rows)

    def args(self, microbatch: int) -> tuple[Any, ...]:
        """On the first stage: this microbatch's positional arguments."""
        assert self._arg_pieces is not None
        args: tuple[Any, ...] = self._arg_pieces[microbatch]
        return args

    def kwargs(self, microbatch: int, share: Share) -> dict[str, Any]:
        """This microbatch's keyword arguments."""
        if self._kwargs is None:
            return {}
        if self._kwarg_pieces is None:
            self._kwarg_pieces = self._kwargs.pieces(self._n_microbatches, batch_rows=share.batch_rows)
        kwargs: dict[str, Any] = self._kwarg_pieces[microbatch]
        return kwargs

    def target(self, microbatch: int, share: Share) -> Any:
        """This microbatch's target.

        One whose length is a multiple of the batch's is cut in proportion, unless the arguments are cut along another
        dimension.
        """
        if share.batch_rows and share.rows != sizes(share.batch_rows, self._n_microbatches)[microbatch]:
            raise InputError(
                f"the first stage was given microbatches of differing lengths ({share.rows} of {share.batch_rows} rows "
                f"in microbatch {microbatch}), which a whole target cannot be cut like: give target_mbs= here"
            )
        if self._target_pieces is None:
            self._target_pieces = self._target.pieces(
                self._n_microbatches, batch_rows=share.batch_rows, scaled=True, others=self._others
            )
        return self._target_pieces[microbatch]

    def loss_kwargs(self, microbatch: int, share: Share) -> dict[str, Any]:
        """This microbatch's keyword arguments of the loss function."""
        if self._options is None:
            return {}
        rows = share.batch_rows or self._target.rows(self._n_microbatches)
        return self._options.of(microbatch, rows, self._others)

    def weight(self, microbatch: int, share: Share) -> float:
        """This microbatch's share of a mean over the whole batch."""
        if share.batch_rows:
            return share.rows / share.batch_rows
        rows = self._target.rows(self._n_microbatches)
        return sizes(rows, self._n_microbatches)[microbatch] / rows if rows else 1 / self._n_microbatches

    def describe(self) -> str:
        """What this rank was given that is cut, and along which dimension."""
        trees = (self._args, self._kwargs, self._target)
        return ", ".join(text for tree in trees if tree is not None and (text := tree.describe()))

    @property
    def leaves(self) -> list[Tensor]:
        """Returns the leaves at which gradients of the batch itself gather."""
        return [entrance.leaf for entrance in self._entrances]

    def finish(self) -> None:
        """Walks the graphs behind the batch, after the last microbatch's backward."""
        gathered = [(entrance.tensor, entrance.leaf.grad) for entrance in self._entrances]
        self._entrances = []
        pairs = [(tensor, gradient) for tensor, gradient in gathered if gradient is not None]
        if pairs:
            run_backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
