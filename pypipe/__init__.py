"""Pipeline-parallel training for PyTorch: an import swap for torch.distributed.pipelining."""

from __future__ import annotations

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from pypipe.errors import (
    ConfigurationError,
    CorruptionError,
    InputError,
    LayoutError,
    MismatchError,
    NameClashWarning,
    NonFiniteError,
    PeerLost,
    PipelineError,
    PipelineTimeout,
    RemoteStageError,
)

if TYPE_CHECKING:
    from pypipe.base_schedule import Schedule
    from pypipe.program import ProgramError
    from pypipe.runtime.batch.chunk_specs import Reduce, Replicate, TensorChunkSpec
    from pypipe.schedules import (
        Schedule1F1B,
        ScheduleAuto,
        ScheduleDualPipe,
        ScheduleDualPipeV,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
        ScheduleVHalf,
        ScheduleVMin,
        ScheduleZBH1,
        ScheduleZBH2,
        ScheduleZBVZeroBubble,
    )
    from pypipe.stage import PipelineStage

__version__ = _version("pypipe")

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
    "PipelineStage",
    "PipelineTimeout",
    "ProgramError",
    "Reduce",
    "RemoteStageError",
    "Replicate",
    "Schedule",
    "Schedule1F1B",
    "ScheduleAuto",
    "ScheduleDualPipe",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBVZeroBubble",
    "TensorChunkSpec",
    "__version__",
]

# Importing torch takes seconds, which `pypipe --help` and programs as data can do without.
_HOMES = {
    "PipelineStage": "pypipe.stage",
    "ProgramError": "pypipe.program",
    "Reduce": "pypipe.runtime.batch.chunk_specs",
    "Replicate": "pypipe.runtime.batch.chunk_specs",
    "Schedule": "pypipe.base_schedule",
    "Schedule1F1B": "pypipe.schedules",
    "ScheduleAuto": "pypipe.schedules",
    "ScheduleDualPipe": "pypipe.schedules",
    "ScheduleDualPipeV": "pypipe.schedules",
    "ScheduleGPipe": "pypipe.schedules",
    "ScheduleInterleaved1F1B": "pypipe.schedules",
    "ScheduleInterleavedZeroBubble": "pypipe.schedules",
    "ScheduleLoopedBFS": "pypipe.schedules",
    "ScheduleVHalf": "pypipe.schedules",
    "ScheduleVMin": "pypipe.schedules",
    "ScheduleZBH1": "pypipe.schedules",
    "ScheduleZBH2": "pypipe.schedules",
    "ScheduleZBVZeroBubble": "pypipe.schedules",
    "TensorChunkSpec": "pypipe.runtime.batch.chunk_specs",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pypipe' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
