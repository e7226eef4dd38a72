"""The CUDA driver and NCCL: found and loaded when they are first asked for, never at import."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os

from pypipe import _core
from pypipe.errors import ConfigurationError
from pypipe.runtime import environment

__all__ = [
    "MAX_CONNECTIONS",
    "NCCL_MISSING",
    "NCCL_NAME",
    "cuda",
    "find_cuda",
    "find_nccl",
    "gpu",
    "nccl",
    "one_queue",
    "queues",
]

NCCL_NAME = "libnccl.so.2"
NCCL_MISSING = (
    "CUDA builds of torch bring NCCL; else pip install 'pypipe[cu13]' (or 'pypipe[cu12]', as your driver has it), or "
    f"let PYPIPE_NCCL_LIBRARY say where {NCCL_NAME} is"
)

# A variable of CUDA's own: how many hardware queues the streams of a device share.
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_CONNECTIONS, _MOST_CONNECTIONS = 8, 32  # without the variable; and the most that CUDA gives

# A communicator's transfers have a stream of pypipe's; NCCL adds two of its own, for the device and for the host
# (sharedRes in src/init.cc of 2.28.9).
_STREAMS_OF_A_COMMUNICATOR = 3


def one_queue() -> str | None:
    """What is wrong with CUDA_DEVICE_MAX_CONNECTIONS, if anything is."""
    if os.environ.get(MAX_CONNECTIONS) != "1":
        return None
    return (
        f"{MAX_CONNECTIONS}=1: all streams of a GPU share one queue of work, so a send can stand behind a receive that "
        "waits for the other rank, and transfers overlap no compute. Megatron sets it for tensor parallelism; for a "
        "pipeline, unset it."
    )


def queues() -> str:
    """How many communicators have queues of a GPU for all of their streams, and what to do for more."""
    value = os.environ.get(MAX_CONNECTIONS, "")
    given = value.isascii() and value.isdigit() and 1 <= int(value) <= _MOST_CONNECTIONS
    connections = int(value) if given else _CONNECTIONS
    enough = max(0, connections - 1) // _STREAMS_OF_A_COMMUNICATOR  # one is the compute stream's
    origin = "" if given else f" unless {MAX_CONNECTIONS} says otherwise"
    text = (
        f"The streams of a GPU share {connections} queues of work{origin}. Compute has one stream and each NCCL "
        f"communicator {_STREAMS_OF_A_COMMUNICATOR}, so up to {enough} communicators of a rank have queues of their "
        "own; streams that share one can wait for each other."
    )
    if connections < _MOST_CONNECTIONS:
        text += f" For more, set {MAX_CONNECTIONS}={_MOST_CONNECTIONS} before CUDA is initialized."
    return text


def find_cuda() -> tuple[_core.CudaLibrary | None, str]:
    """The CUDA driver, or None and the reason. Raises CoreError where the file is not a whole CUDA driver."""
    return _core.open_cuda(environment.read("PYPIPE_CUDA_LIBRARY"))


def find_nccl() -> tuple[_core.NcclLibrary | None, str]:
    """NCCL, or None and the reason. Raises CoreError where the file is not a whole NCCL of 2.18 or later.

    In this order: what PYPIPE_NCCL_LIBRARY names, and then nothing else; the copy that torch or another library has
    loaded into this process; the wheels, conda packages and system folders that cuda-pathfinder knows; the loader's
    own.
    """
    override = environment.read("PYPIPE_NCCL_LIBRARY")
    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("torch")  # so that the answer does not depend on who was imported first
    return _core.open_nccl(override, [] if override or _core.loaded_library(NCCL_NAME) else _known_to_pathfinder())


@functools.cache
def cuda() -> _core.CudaLibrary:
    """The CUDA driver. Raises ConfigurationError without a usable one."""
    try:
        library, reason = find_cuda()
    except _core.CoreError as error:
        raise ConfigurationError(f"{error}: give PYPIPE_CUDA_LIBRARY a CUDA driver, or unset it") from error
    if library is None:
        raise ConfigurationError(f"no CUDA driver, so no GPU can be used here ({reason})")
    return library


@functools.cache
def nccl() -> _core.NcclLibrary:
    """NCCL. Raises ConfigurationError without a usable one."""
    try:
        library, reason = find_nccl()
    except _core.CoreError as error:
        raise ConfigurationError(f"{error}: give PYPIPE_NCCL_LIBRARY another one") from error
    if library is None:
        raise ConfigurationError(f"no NCCL, so stages on GPUs can't reach each other ({reason}). {NCCL_MISSING}")
    return library


@functools.cache
def gpu(ordinal: int) -> _core.CudaGpu:
    """A GPU, by its number in this process. Its primary context, which is torch's, is retained.

    Raises:
        ConfigurationError: there is no usable driver, or no such GPU.
    """
    try:
        return _core.CudaGpu(cuda(), ordinal)
    except _core.CoreError as error:
        raise ConfigurationError(f"GPU {ordinal} can't be used: {error}") from error


def _known_to_pathfinder() -> list[str]:
    # It loads what it finds; opening the same file again gives the same copy.
    try:
        path = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nccl").abs_path
    except (ImportError, AttributeError, OSError, RuntimeError):  # its own errors are RuntimeErrors
        return []
    return [path] if path else []
