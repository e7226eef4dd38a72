"""What a pipeline is built from on one rank, and what a step is called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from pypipe.errors import InputError
from pypipe.program import Program
from pypipe.runtime.batch.batch import ChunkSpecs
from pypipe.runtime.batch.split_batch import count_microbatches
from pypipe.runtime.rendezvous.config import Config
from pypipe.runtime.rendezvous.world import World
from pypipe.runtime.step.fitting import Fitted

__all__ = ["Call", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What a pipeline is built from on one rank.

    Args:
        world: the ranks.
        device: where this rank's stages live.
        pieces: which piece of the model each of this rank's modules is, and the module.
        fitted: what step() and eval() run, or why there is nothing to run.
        refit: the same for another number of microbatches. Raises ValueError where there is none for that.
        config: what this rank tells the others, as far as it is known now.
        n_microbatches: M.
        loss: the loss function, or None.
        scale_grads: whether gradients are those of the mean over the batch (else of the sum over microbatches).
        specs: how to cut batches and join outputs.
        timeout: seconds that any wait may take.
        checks: those of runtime/checks.py that are wanted.
        static: whether layouts are promised to stay as they are in the first step and the first eval.
        renames: for each of the pieces, what makes a global name of a local one, where it has a prefix.
        get_mesh: for each of the pieces, what gives it a mesh by the names of its dimensions, or None.
    """

    world: World
    device: torch.device
    pieces: Sequence[tuple[int, torch.nn.Module]]
    fitted: Fitted
    refit: Callable[[int], Fitted]
    config: Config
    n_microbatches: int
    loss: Callable[..., Any] | None
    scale_grads: bool
    specs: ChunkSpecs
    timeout: float
    checks: frozenset[str] = frozenset()
    static: bool = False
    renames: Sequence[Callable[[str], str] | None] = ()
    get_mesh: Sequence[Callable[..., Any] | None] = ()

    @property
    def program(self) -> Program | None:
        """What step() runs, with its transfers."""
        verified = self.fitted.training or self.fitted.forward_only
        return verified.program if verified else None

    @property
    def loss_module(self) -> torch.nn.Module | None:
        """The loss function, where it is a module, which may have parameters."""
        return self.loss if isinstance(self.loss, torch.nn.Module) else None

    @cached_property
    def where(self) -> str:
        """This rank's name in error messages."""
        stages = ", ".join(str(piece) for piece, _ in self.pieces)
        return f"rank {self.world.rank}, stage{'s' if len(self.pieces) > 1 else ''} {stages}"


class Call(NamedTuple):
    """What step() or eval() was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    losses: list[Any] | None
    return_outputs: bool
    loss_kwargs: dict[str, Any] | None
    training: bool
    name: str = "step()"
    arg_mbs: Sequence[Any] | None = None
    kwarg_mbs: Sequence[Any] | None = None
    target_mbs: Sequence[Any] | None = None
    n_microbatches: int | None = None

    @property
    def has_target(self) -> bool:
        """Whether there is something for the loss function."""
        return self.target is not None or self.target_mbs is not None

    @property
    def is_split(self) -> bool:
        """Whether it was given microbatches, instead of a batch to be cut."""
        return any(each is not None for each in self.mbs)

    @property
    def mbs(self) -> tuple[Sequence[Any] | None, Sequence[Any] | None, Sequence[Any] | None]:
        """Arguments, keyword arguments and targets, by microbatch."""
        return self.arg_mbs, self.kwarg_mbs, self.target_mbs

    def count(self, default: int) -> int:
        """M.

        Args:
            default: where the call does not say.

        Raises:
            InputError: the call says what cannot be.
        """
        if self.is_split and (self.args or self.kwargs or self.target is not None):
            raise InputError(
                "arg_mbs, kwarg_mbs and target_mbs take microbatches in the place of a batch: give the one or the other"
            )
        found = count_microbatches(*self.mbs)
        wanted = self.n_microbatches
        if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1):
            raise InputError(f"n_microbatches is {wanted!r}; a batch is cut into 1 microbatch or more")
        if found is not None and wanted not in (None, found):
            raise InputError(f"n_microbatches is {wanted}, but {found} microbatches were given")
        return found or wanted or default
