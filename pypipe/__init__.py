"""Pipeline-parallel training for PyTorch: an import swap for torch.distributed.pipelining."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("pypipe._core") is None:
    raise ImportError(
        f"pypipe was imported from {__path__[0]}, a source folder without the compiled core. Start Python from another "
        "folder, set PYTHONSAFEPATH=1 to keep this one off Python's path, or build in place: pip install -e ."
    )

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
from pypipe.runtime.environment import misspelt

if TYPE_CHECKING:
    from pypipe import schedules
    from pypipe.grad_scaler import GradScaler
    from pypipe.inside_stage import Microbatch, add_loss, microbatch
    from pypipe.program import ProgramError
    from pypipe.runtime.batch.chunk_specs import Reduce, Replicate, TensorChunkSpec
    from pypipe.schedules import *  # noqa: F403
    from pypipe.splitting.split import split
    from pypipe.stage import PipelineStage
    from pypipe.ties import tie

__version__ = _version("pypipe")

for _given, _meant in misspelt().items():
    warnings.warn(f"the environment variable {_given} does nothing: did you mean {_meant}?", stacklevel=2)

__all__: list[str] = [
    "ConfigurationError",
    "CorruptionError",
    "GradScaler",
    "InputError",
    "LayoutError",
    "Microbatch",
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
    "TensorChunkSpec",
    "__version__",
    "add_loss",
    "microbatch",
    "split",
    "tie",
]

# The schedules' names are written down in pypipe.schedules alone. Type checkers read them there; when run, __getattr__
# reads them when it is asked for __all__, because importing torch takes seconds, which `pypipe --help` does not need.
_NAMES = tuple(__all__)
if TYPE_CHECKING:
    __all__ += schedules.__all__
else:
    del __all__

_HOMES = {
    "GradScaler": "pypipe.grad_scaler",
    "Microbatch": "pypipe.inside_stage",
    "PipelineStage": "pypipe.stage",
    "ProgramError": "pypipe.program",
    "Reduce": "pypipe.runtime.batch.chunk_specs",
    "Replicate": "pypipe.runtime.batch.chunk_specs",
    "TensorChunkSpec": "pypipe.runtime.batch.chunk_specs",
    "add_loss": "pypipe.inside_stage",
    "microbatch": "pypipe.inside_stage",
    "split": "pypipe.splitting.split",
    "tie": "pypipe.ties",
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        value: Any = sorted({*_NAMES, *importlib.import_module("pypipe.schedules").__all__})
    else:
        home = "pypipe.schedules" if name.startswith("Schedule") else _HOMES.get(name)
        value = getattr(importlib.import_module(home), name, None) if home is not None else None
        if value is None:
            raise AttributeError(f"module 'pypipe' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))
