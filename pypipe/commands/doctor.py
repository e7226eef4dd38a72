"""`pypipe doctor`: which libraries are found here, which are missing, and what that means.

Loading a library runs code of its own, so all of this happens when it is asked for, and each part may fail alone.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pypipe.commands.conventions import json_option, rendered

__all__ = ["Library", "Report", "command", "inspect"]

_Opened = TypeVar("_Opened")

_WIDTH_OF_A_FILE = 1000  # so that paths are in one piece
_COMMUNICATOR_TIMEOUT = 60.0  # seconds; a first communicator takes a few

# What cuInit answers most often, by CUresult.
_NO_DEVICE, _STUB, _DRIVER_MISMATCH = "(100)", "(34)", "(803)"
_CUDA_REMEDIES = {
    _NO_DEVICE: "The driver sees no GPU: check CUDA_VISIBLE_DEVICES, and in a container that it was given GPUs.",
    _STUB: "This file is the stub that programs are linked against, not the driver: take its folder off "
    "LD_LIBRARY_PATH.",
    _DRIVER_MISMATCH: "The driver's library and its kernel module are of different releases: reboot, or give the "
    "container the host's own library.",
}


@dataclass
class Library:
    """What was found of one library."""

    name: str
    path: str | None = None
    version: str | None = None
    problem: str | None = None  # why it can't be used
    broken: bool = False  # it is there, or was asked for, and can't be used

    def fail(self, problem: object, *, broken: bool = True) -> None:
        """Notes why it can't be used."""
        self.problem, self.broken = str(problem), broken


@dataclass
class Report:
    """What `pypipe doctor` has found.

    Attributes:
        core, torch, cuda, nccl: the libraries; `cuda` is the driver.
        torch_cuda: the CUDA release that torch was built for, or None.
        torch_nccl: the file of the NCCL that torch uses; torch's folder, where it is linked into torch; or None.
        torch_nccl_version: its version, or None.
        gpus: names of the GPUs that this process may use.
        communicator: "works", or what NCCL said; None where it was not tried, for want of a GPU or of NCCL.
        environment: the variables that matter: what they are set to (None where they aren't) and do.
        notes: what all this means, in sentences.
        healthy: nothing is broken. A machine without GPUs is healthy.
    """

    pypipe: str
    python: str
    core: Library
    torch: Library
    cuda: Library
    nccl: Library
    torch_cuda: str | None = None
    torch_nccl: str | None = None
    torch_nccl_version: str | None = None
    gpus: list[str] = field(default_factory=list)
    communicator: str | None = None
    environment: dict[str, dict[str, str | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    healthy: bool = True


@click.command("doctor")
@click.option("--env", "only_environment", is_flag=True, help="Show the environment variables and what they do, only.")
@json_option
def command(only_environment: bool, as_json: bool) -> None:
    """Show the libraries found here, and what is missing.

    The exit code is 0 unless something is broken; a machine without a GPU is not.
    """
    if only_environment:
        variables = inspect_environment()
        text = rendered(lambda console: _print_variables(console, variables), 120)
        click.echo(json.dumps(variables) if as_json else text)
        return
    report = inspect()
    text = rendered(lambda console: _print(console, report), _WIDTH_OF_A_FILE)
    click.echo(json.dumps(asdict(report)) if as_json else text)
    raise SystemExit(0 if report.healthy else 1)


def inspect() -> Report:
    """Loads every library that pypipe may use, and tries them."""
    import pypipe

    report = Report(
        pypipe=pypipe.__version__,
        python=f"{platform.python_version()} ({sys.executable})",
        core=Library("core"),
        torch=Library("torch"),
        cuda=Library("CUDA driver"),
        nccl=Library("NCCL"),
        environment=inspect_environment(),
    )
    # NCCL_DEBUG makes NCCL write to the standard output, which is for the report.
    os.environ.setdefault("NCCL_DEBUG_FILE", "/dev/stderr")
    _inspect_core(report)
    if not report.core.broken:
        _inspect_torch(report)  # before NCCL: pypipe uses the copy that torch has loaded
        _inspect_cuda(report)
        _inspect_nccl(report)
    _explain(report)
    report.healthy = not any(each.broken for each in (report.core, report.torch, report.cuda, report.nccl))
    return report


def _inspect_core(report: Report) -> None:
    try:
        core = importlib.import_module("pypipe._core")
    except ImportError as error:
        report.core.fail(error)
        return
    report.core.path, report.core.version = core.__file__, core.__version__


def _inspect_torch(report: Report) -> None:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        report.torch.fail(error)
        return
    report.torch.path, report.torch.version = os.path.dirname(torch.__file__ or ""), str(torch.__version__)
    report.torch_cuda = torch.version.cuda
    if report.torch_cuda is None:
        return
    from pypipe import _core
    from pypipe.runtime.libraries import NCCL_NAME

    report.torch_nccl = _core.loaded_library(NCCL_NAME)
    try:
        report.torch_nccl_version = ".".join(str(part) for part in torch.cuda.nccl.version())
    except (AttributeError, RuntimeError, TypeError):
        return  # built without it
    if report.torch_nccl is None:
        report.torch_nccl = report.torch.path  # linked into torch's own libraries


def _inspect_cuda(report: Report) -> None:
    from pypipe._core import CoreError
    from pypipe.runtime.libraries import find_cuda

    cuda = report.cuda
    library = _open(cuda, find_cuda, "PYPIPE_CUDA_LIBRARY")
    if library is None:
        return
    cuda.path = library.path
    try:
        cuda.version = _cuda_version(library.version)
        report.gpus = library.device_names()
    except CoreError as error:
        # No GPU to see is an ordinary answer; any other says that there may be one.
        cuda.fail(error, broken=not any(code in str(error) for code in (_NO_DEVICE, _STUB)))


def _inspect_nccl(report: Report) -> None:
    from pypipe._core import CoreError, WaitPolicy
    from pypipe.errors import ConfigurationError
    from pypipe.runtime.libraries import find_nccl, gpu

    nccl = report.nccl
    library = _open(nccl, find_nccl, "PYPIPE_NCCL_LIBRARY")
    if library is None:
        return
    nccl.path, nccl.version = library.path, _nccl_version(library.version)
    if not report.gpus:
        return
    try:
        library.try_communicator(gpu(0), WaitPolicy(_COMMUNICATOR_TIMEOUT))
        report.communicator = "works"
    except (CoreError, ConfigurationError) as error:
        report.communicator = str(error)
        nccl.fail(error)


def _open(found: Library, find: Callable[[], tuple[_Opened | None, str]], variable: str) -> _Opened | None:
    """The library, or None after noting why there is none: broken, or not found although the variable names a file."""
    from pypipe._core import CoreError
    from pypipe.runtime import environment

    try:
        library, reason = find()
    except CoreError as error:
        found.fail(error)
        return None
    if library is None:
        found.fail(reason, broken=bool(environment.read(variable)))
    return library


def inspect_environment() -> dict[str, dict[str, str | None]]:
    """For each variable that pypipe reads or sets: `value` (None where it is not set), `default` and `meaning`."""
    from pypipe.runtime.environment import OTHERS_READ, OTHERS_SET, VARIABLES

    return {
        name: {"value": os.environ.get(name), "default": variable.default, "meaning": variable.meaning}
        for name, variable in (VARIABLES | OTHERS_READ | OTHERS_SET).items()
    }


def _explain(report: Report) -> None:
    cuda, nccl, notes = report.cuda, report.nccl, report.notes
    if report.core.broken:
        notes.append("pypipe's own core does not load: install pypipe again, with this Python.")
        return
    from pypipe.runtime.libraries import NCCL_MISSING, one_queue, queues

    if report.torch.broken:
        notes.append("torch does not load, and nothing of pypipe runs without it: install it again.")
    if cuda.path is None and not cuda.broken:
        notes.append("There is no CUDA driver, so no GPU: stages run on the CPU here.")
    elif cuda.path is None:
        notes.append(_unusable(cuda, "the CUDA driver", "PYPIPE_CUDA_LIBRARY"))
    elif not report.gpus:
        remedy = next((text for code, text in _CUDA_REMEDIES.items() if code in (cuda.problem or "")), "")
        notes.append(f"There is a CUDA driver but no GPU to use: stages run on the CPU here. {remedy}".strip())
    if report.gpus and report.torch_cuda is None and report.torch.version is not None:
        notes.append("This torch is built without CUDA, so it can't use the GPU: install a build of torch for CUDA.")
    if nccl.broken:
        notes.append(_unusable(nccl, "NCCL", "PYPIPE_NCCL_LIBRARY"))
    elif nccl.path is None and report.gpus:
        notes.append(f"There is no NCCL, so stages on GPUs can't reach each other. {NCCL_MISSING}.")
    elif nccl.path is None:
        notes.append("There is no NCCL; only stages on GPUs need it.")
    notes.extend(_which_nccl(report))
    if (problem := one_queue()) is not None:
        notes.append(problem)
    elif report.gpus:
        notes.append(queues())
    from pypipe.runtime.environment import misspelt

    notes.extend(f"{given} does nothing: did you mean {meant}?" for given, meant in misspelt().items())


def _unusable(library: Library, name: str, variable: str) -> str:
    remedy = f" Correct {variable}, or unset it." if os.environ.get(variable) else ""
    return f"{name[0].upper()}{name[1:]} can't be used: {library.problem}.{remedy}"


def _which_nccl(report: Report) -> list[str]:
    if report.torch_cuda is None:
        return ["torch is built without CUDA and uses no NCCL."] if report.torch.version is not None else []
    if report.torch_nccl is None:
        return ["torch is built without NCCL."]
    theirs, ours = report.torch_nccl, report.nccl.path
    if theirs == report.torch.path:
        text = f"torch uses NCCL {report.torch_nccl_version}, which is part of its own libraries ({theirs})"
    else:
        text = f"torch uses NCCL {report.torch_nccl_version}: {theirs}"
    if ours is None:
        return [f"{text}."]
    if os.path.realpath(ours) == os.path.realpath(theirs):
        return [f"{text}. pypipe uses the same copy."]
    return [f"{text}. pypipe uses another copy, {ours}; both have buffers on the GPU of their own."]


def _print(console: Console, report: Report) -> None:
    libraries = [
        ("pypipe", report.pypipe, report.core.path or report.core.problem or ""),
        ("Python", *report.python.rstrip(")").split(" (", 1)),
        _row(report.torch),
        _row(report.cuda),
        _row(report.nccl),
        ("GPUs", str(len(report.gpus)), ", ".join(report.gpus)),
    ]
    if report.communicator is not None:
        libraries.append(("Communicator", "", report.communicator))
    console.print(_grid(libraries))
    shown = {name: each for name, each in report.environment.items() if name.startswith("PYPIPE_") or each["value"]}
    if shown:
        console.print(Text("\nEnvironment"))
        console.print(_grid([("  " + name, _shown(each)) for name, each in shown.items()]))
    console.print(Text("\nWhat this means"))
    for note in report.notes:
        console.print(Text(f"- {note}"), soft_wrap=True)


def _print_variables(console: Console, variables: dict[str, dict[str, str | None]]) -> None:
    table = Table("variable", "value", "meaning", box=None, padding=(0, 2, 0, 0), leading=1)
    for name, each in variables.items():
        table.add_row(Text(name, no_wrap=True), Text(_shown(each)), Text(each["meaning"] or ""))
    console.print(table)


def _grid(rows: list[tuple[str, ...]]) -> Table:
    """Cells in columns, without a line or a title; the last column alone may be cut into lines."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(cell, no_wrap=cell is not row[-1], overflow="fold") for cell in row))
    return table


def _row(library: Library) -> tuple[str, str, str]:
    if library.path is None:
        return library.name, "broken" if library.broken else "missing", library.problem or ""
    shown = library.path if library.problem is None else f"{library.path}: {library.problem}"
    return library.name, library.version or "", shown


def _shown(variable: dict[str, str | None]) -> str:
    if variable["value"] is not None:
        return variable["value"]
    return f"{variable['default']} (default)" if variable["default"] else "not set"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _nccl_version(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
