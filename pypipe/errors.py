"""The errors of pypipe: one small hierarchy, so that ``except PipelineError`` catches all of them."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ConfigurationError",
    "CorruptionError",
    "InputError",
    "LayoutError",
    "MismatchError",
    "NameClashWarning",
    "NonFiniteError",
    "PeerLost",
    "PipelineError",
    "PipelineTimeout",
    "RemoteStageError",
]


class PipelineError(RuntimeError):
    """Something is wrong with a pipeline; the message says what, where, and what to do."""


class ConfigurationError(PipelineError, ValueError):
    """A stage or a schedule was built with arguments that cannot work, or that differ between ranks."""


class InputError(PipelineError, ValueError):
    """What was given to step() or eval(), or what a loss function returned, cannot be used."""


class LayoutError(PipelineError, TypeError):
    """A stage returned something that cannot be sent to the next stage."""


class MismatchError(PipelineError):
    """A message is not the one that this rank expected: the ranks run different programs."""


class CorruptionError(PipelineError):
    """A message's bytes changed between two ranks; found by `check="checksum"`."""


class NonFiniteError(PipelineError, ArithmeticError):
    """A stage, a loss or a backward made a NaN or an infinity; found by `check="nan"`, where it first arose."""


class PeerLost(PipelineError):
    """Another rank died, exited, or closed its schedule while this one still needed it."""


class PipelineTimeout(PipelineError, TimeoutError):
    """Another rank did not do its part before the schedule's deadline."""


class NameClashWarning(UserWarning):
    """Two stages have a `state_dict` key in common, of which torch.distributed.checkpoint would keep one tensor."""


class RemoteStageError(PipelineError):
    """Another rank failed first; this rank stopped because of it.

    Attributes:
        rank: the rank (of the pipeline's group) where the first cause arose.
        stage: its stage there, or None where no stage was running.
        action: what it was doing, in the notation of programs (``2F0``), or None.
        microbatch: the microbatch it was working on, or None.
        remote_traceback: that rank's own traceback, as text.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        stage: int | None = None,
        action: str | None = None,
        microbatch: int | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.action = action
        self.microbatch = microbatch
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> Any:
        parts = (str(self), self.rank, self.stage, self.action, self.microbatch, self.remote_traceback)
        return _remote_stage_error, parts


def _remote_stage_error(
    message: str, rank: int, stage: int | None, action: str | None, microbatch: int | None, text: str
) -> RemoteStageError:
    return RemoteStageError(
        message, rank=rank, stage=stage, action=action, microbatch=microbatch, remote_traceback=text
    )
