"""torch's stages: PipelineStage is pypipe's; what the tracing front end builds is refused."""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist

from pypipe import stage
from pypipe.errors import ConfigurationError

__all__ = ["PipelineStage", "build_stage"]


class PipelineStage(stage.PipelineStage):
    """pypipe's stage, with what trainers read of torch's.

    Attributes:
        name: as torch's class names it.
        group_rank, group_size: this rank's place in the pipeline's group.
        has_backward: whether the last call trained; torch's schedules set it.
    """

    has_backward = False

    @property
    def name(self) -> str:
        """The class's name; torch's messages begin with it."""
        return type(self).__name__

    @property
    def group_rank(self) -> int:
        """This rank, in the pipeline's group."""
        return self.world.rank

    @property
    def group_size(self) -> int:
        """How many ranks the pipeline has."""
        return self.world.size

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """On which rank each stage is, where no schedule has said otherwise: stage s on rank s mod P."""
        return {each: each % self.group_size for each in range(self.num_stages)}

    def clear_runtime_states(self) -> None:
        """Does nothing: a stage keeps nothing between steps."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name!r}: pypipe.compat puts pypipe's PipelineStage in the place of torch's, and it has no such "
            "attribute; messages, activations and gradients are kept in pypipe's core"
        )


def build_stage(
    stage_module: Any, stage_index: int, pipe_info: Any, device: Any, group: dist.ProcessGroup | None = None
) -> NoReturn:
    """Refuses: a stage of torch's tracing front end may have values that skip stages, which only torch's classes send.

    Raises:
        ConfigurationError: always; the message says what to do.
    """
    raise ConfigurationError(
        f"stage {stage_index}: Pipe.build_stage() and build_stage() make torch's own stages, which pypipe's schedules "
        f"do not run: give PipelineStage(pipe.get_stage_module({stage_index}), {stage_index}, pipe.num_stages, "
        "device), if each stage takes what the one before returns, or call pypipe.compat.uninstall() first"
    )
