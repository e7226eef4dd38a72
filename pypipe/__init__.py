"""Pipeline-parallel training for PyTorch: an import swap for torch.distributed.pipelining."""

from importlib.metadata import version as _version

from pypipe.errors import (
    ConfigurationError,
    InputError,
    LayoutError,
    MismatchError,
    PeerLost,
    PipelineError,
    PipelineTimeout,
    RemoteStageError,
)
from pypipe.runtime.microbatches import Reduce, Replicate, TensorChunkSpec
from pypipe.schedules import Schedule1F1B, ScheduleGPipe
from pypipe.stage import PipelineStage

__version__ = _version("pypipe")

__all__ = [
    "ConfigurationError",
    "InputError",
    "LayoutError",
    "MismatchError",
    "PeerLost",
    "PipelineError",
    "PipelineStage",
    "PipelineTimeout",
    "Reduce",
    "RemoteStageError",
    "Replicate",
    "Schedule1F1B",
    "ScheduleGPipe",
    "TensorChunkSpec",
    "__version__",
]
