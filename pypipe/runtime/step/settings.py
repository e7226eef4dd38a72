"""What a pipeline is built from on one rank, and what a step is called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from pypipe.program import Program
from pypipe.runtime.batch.batch import ChunkSpecs
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
        config: what this rank tells the others, as far as it is known now.
        n_microbatches: M.
        loss: the loss function, or None.
        scale_grads: whether gradients are those of the mean over the batch (else of the sum over microbatches).
        specs: how to cut batches and join outputs.
        timeout: seconds that any wait may take.
        checks: those of runtime/checks.py that are wanted.
        static: whether layouts are promised to stay as they are in the first step and the first eval.
        get_mesh: for each of the pieces, what gives it a mesh by the names of its dimensions, or None.
    """

    world: World
    device: torch.device
    pieces: Sequence[tuple[int, torch.nn.Module]]
    fitted: Fitted
    config: Config
    n_microbatches: int
    loss: Callable[..., Any] | None
    scale_grads: bool
    specs: ChunkSpecs
    timeout: float
    checks: frozenset[str] = frozenset()
    static: bool = False
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
