"""What wraps a stage's parameters for data parallelism, and when in a step it acts.

DistributedDataParallel and fully_shard expect one forward and one backward per step: they gather parameters before the
one, and reduce gradients in the other. A stage has M of each, in whatever order its program lists them, and a backward
may come in two halves. So wrappers are told to do nothing of their own accord during a step, and are called where the
program has UNSHARD, REDUCE_GRAD and RESHARD: each once per stage and step, for the gradients of all microbatches.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Wrapper", "find_wrappers"]


class Wrapper(Protocol):
    """A wrapper of a stage, or of a part of one."""

    shards: bool
    """Whether parameters are sharded, so that UNSHARD and RESHARD have something to do."""
    moves_gradients: bool
    """Whether a parameter's `.grad` may be taken away between two backwards of a step."""

    def identity(self) -> int:
        """Tells it from any other wrapper, and from itself where it has been applied anew."""

    def problem(self, others: frozenset[int]) -> str | None:
        """Why it cannot be used in a stage, and what to do; None where it can.

        Args:
            others: the global ranks of this pipeline's other members, none of which is a replica of the stage.
        """

    def begin(self, *, training: bool) -> None:
        """Begins a step: from now on nothing is gathered, freed or reduced but by the methods below."""

    def unshard(self) -> None:
        """UNSHARD: gathers the parameters."""

    def after_backward(self) -> None:
        """After each B, or each half of one: takes what has been added to `.grad` where it is kept elsewhere."""

    def reduce(self) -> None:
        """REDUCE_GRAD: reduces the gradients among the replicas, unless the user has turned that off for now.

        Raises:
            PipelineError: a replica had failed.
        """

    def reshard(self) -> None:
        """RESHARD: frees the gathered parameters."""

    def end(self) -> None:
        """Ends a step, complete or not, and restores the user's settings of the wrapper. Idempotent."""

    def forward_failed(self) -> None:
        """In place of a forward, after abandon(): takes part in what the replicas do together there."""

    def reduce_failed(self, reason: str) -> None:
        """In place of reduce(), after abandon(): takes part in the reduction, so that no replica waits for this one.

        Args:
            reason: why the step has failed, in one line; what the other replicas raise has it.
        """

    def abandon(self) -> str | None:
        """After a step that failed, before end(): frees what the step holds.

        Returns:
            What has become of its gradients, as half a sentence; None where reduce() has ended.
        """


def find_wrappers(module: nn.Module) -> list[Wrapper]:
    """The wrappers in a stage's module, in the order of `module.modules()`: the same on all replicas."""
    found: list[Wrapper] = []
    # A module can be wrapped only if the wrapper's module has been imported, and importing it takes a while.
    has_fsdp = "torch.distributed.fsdp" in sys.modules
    has_replicate = "torch.distributed._composable.replicate" in sys.modules
    below: set[nn.Module] = set()
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            from pypipe.runtime.data_parallel.ddp import Replicated

            found.append(Replicated.by_ddp(part))
        elif has_replicate and (state := _replicate_state(part)) is not None:
            from pypipe.runtime.data_parallel.ddp import Replicated

            found.append(Replicated.by_replicate(part, state))
        elif has_fsdp and part not in below:
            from torch.distributed.fsdp import FSDPModule

            if isinstance(part, FSDPModule):
                from pypipe.runtime.data_parallel.fsdp import Sharded

                below.update(part.modules())
                found.append(Sharded(part))
    return found


def _replicate_state(module: nn.Module) -> Any:
    made: Any = sys.modules["torch.distributed._composable.replicate"]
    return made.replicate.state(module) if isinstance(module, getattr(made, "DDP", ())) else None
