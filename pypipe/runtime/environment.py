"""The environment variables that pypipe reads or sets: these tables, and nowhere else."""

from __future__ import annotations

import difflib
import os
from typing import NamedTuple

from pypipe.errors import ConfigurationError

__all__ = ["OTHERS_READ", "OTHERS_SET", "VARIABLES", "Variable", "misspelt", "read"]


class Variable(NamedTuple):
    """One variable: its default (as text) and what it does."""

    default: str
    meaning: str


VARIABLES: dict[str, Variable] = {
    "PYPIPE_LINK": Variable(
        "auto",
        "Which link carries messages between two ranks: auto (shared memory between CPU stages of one host, "
        "NCCL between GPUs, else c10d), shm, nccl, or c10d. What one rank says holds for the whole pipeline.",
    ),
    "PYPIPE_ADDRESS": Variable(
        "",
        "The address at which this rank's control socket listens for ranks on other hosts. Default: the one that "
        "this host uses to reach MASTER_ADDR.",
    ),
    "PYPIPE_NCCL_COMMUNICATORS": Variable(
        "auto",
        "How many NCCL communicators two ranks have: one for each link, so that transfers of both directions run at "
        "once (link); one for all, which runs one group of transfers after another (pair); or auto: link, unless those "
        "of some rank would take more than half of its GPU's multiprocessors. Alike on all ranks.",
    ),
    "PYPIPE_NCCL_MAX_CTAS": Variable(
        "auto",
        "How many thread blocks (CTAs) an NCCL communicator may take, 1 to 64: more carry a large message faster, and "
        "take as many multiprocessors from compute meanwhile. By itself: 16 within a host and 4 between hosts, fewer "
        "where a rank's communicators would take more than half of its GPU. Alike on all ranks.",
    ),
    "PYPIPE_RECORD_DIR": Variable(
        "",
        "A folder, one that all ranks reach or one on each host, where each rank keeps a record of its latest actions. "
        "It stays there when the pipeline fails or a rank is killed: `pypipe show --record DIR` shows what happened.",
    ),
    "PYPIPE_CUDA_LIBRARY": Variable(
        "",
        "The file of the CUDA driver to use. Default: the libcuda.so.1 that the loader finds.",
    ),
    "PYPIPE_NCCL_LIBRARY": Variable(
        "",
        "The file of NCCL to use. Default: the libnccl.so.2 that torch has loaded, else the one that cuda-pathfinder "
        "or the loader finds.",
    ),
}
"""pypipe's own."""

OTHERS_READ: dict[str, Variable] = {
    "RANK": Variable("", "torchrun's: this process's rank. Read where there is no process group."),
    "WORLD_SIZE": Variable(
        "1", "torchrun's: the number of ranks. Read where there is no process group, and by `pypipe bench`."
    ),
    "MASTER_ADDR": Variable(
        "",
        "torchrun's: the host of the rendezvous store. Read where there is no process group, and to find the address "
        "at which other hosts reach this one.",
    ),
    "MASTER_PORT": Variable("", "torchrun's: the port of the store. Read where there is no process group."),
    "CUDA_DEVICE_MAX_CONNECTIONS": Variable(
        "", "CUDA's: how many queues the streams of a GPU share. With 1, transfers overlap no compute; pypipe warns."
    ),
    "COLUMNS": Variable("", "The width of what the commands print, where their output is not a terminal."),
}
"""Variables of others that pypipe reads."""

OTHERS_SET: dict[str, Variable] = {
    "NCCL_DEBUG_FILE": Variable(
        "",
        "Set to /dev/stderr by `pypipe doctor` alone, unless it is set already: what NCCL_DEBUG asks for stays out of "
        "the report.",
    ),
    "GLOO_SOCKET_IFNAME": Variable(
        "",
        "Set to lo in the rank processes of `pypipe demo` alone, unless it is set already: they are all on "
        "this machine.",
    ),
}
"""Variables of others that pypipe sets, where they are not set."""


def read(name: str, choices: tuple[str, ...] = ()) -> str:
    """The variable's value, or its default where it is not set, or empty.

    Raises:
        ConfigurationError: the value is not one of `choices`.
    """
    value = os.environ.get(name) or VARIABLES[name].default
    if choices and value not in choices:
        raise ConfigurationError(f"{name}={value!r}: it takes {', '.join(choices)}")
    return value


def misspelt() -> dict[str, str]:
    """Finds variables that are set and nearly one of pypipe's own: what is meant, by what is set."""
    meant = {}
    for name in os.environ:
        if name.startswith("PYPIPE") and name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.85)
            if near:
                meant[name] = near[0]
    return meant
