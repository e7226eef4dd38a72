"""Putting pypipe's classes under torch's names, and taking them away again."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining import _IR as ir_module
from torch.distributed.pipelining import schedules as schedules_module
from torch.distributed.pipelining import stage as stage_module

from pypipe.compat import schedules, stages
from pypipe.errors import ConfigurationError

__all__ = ["install", "installed", "uninstall"]

_MODULES = (pipelining, schedules_module, stage_module, ir_module)
_MISSING = object()
_before: dict[tuple[types.ModuleType, str], Any] = {}  # what torch had under the names that are replaced now


def _replacements() -> dict[tuple[types.ModuleType, str], Any]:
    """What goes where. Names that this torch does not have are added, since newer trainers import them."""
    wanted: dict[tuple[types.ModuleType, str], Any] = {
        (schedules_module, name): cls for name, cls in schedules.CLASSES.items()
    }
    wanted[schedules_module, "get_schedule_class"] = schedules.get_schedule_class
    wanted[stage_module, "PipelineStage"] = stages.PipelineStage
    for name in ("build_stage", "_PipelineStage"):
        wanted[stage_module, name] = stages.build_stage
    wanted[ir_module, "_PipelineStage"] = stages.build_stage  # what Pipe.build_stage() calls
    public = {name for name in schedules.CLASSES if name.startswith("Schedule")} | {"_ScheduleForwardOnly"}
    wanted |= {(pipelining, name): schedules.CLASSES[name] for name in public}
    wanted |= {(pipelining, "PipelineStage"): stages.PipelineStage, (pipelining, "build_stage"): stages.build_stage}
    return wanted


def _imported_before(replaced: dict[tuple[types.ModuleType, str], Any]) -> list[str]:
    """Modules that have torch's own classes under names of their own, or classes derived from them."""
    theirs = {id(value): name for (_, name), value in replaced.items() if value is not _MISSING}
    found = []
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("torch", "pypipe") or not isinstance(module, types.ModuleType):
            continue
        own = vars(module)
        names = sorted({theirs[id(value)] for value in list(own.values()) if id(value) in theirs})
        if names:
            found.append(f"{module_name} ({', '.join(names)})")
    derived = set()
    for cls in (value for value in replaced.values() if isinstance(value, type)):
        each: type
        for each in cls.__subclasses__():
            if each.__module__.partition(".")[0] not in ("torch", "pypipe"):
                derived.add(f"{each.__module__}.{each.__qualname__} (derived from {cls.__name__})")
    return sorted([*found, *derived])


def install() -> None:
    """Puts pypipe's stages and schedules under the names of torch.distributed.pipelining. Idempotent.

    Call it before the import of what is to use them, on every rank. `from torch.distributed.pipelining import ...` then
    gives pypipe's classes, and so do the modules `schedules` and `stage`, `get_schedule_class` included. `SplitPoint`,
    `pipe_split`, `pipeline` and chunk specs remain torch's; `build_stage` and `Pipe.build_stage` are refused.

    Raises:
        ConfigurationError: a module has imported torch's own classes already, or derived a class from them, and would
            go on with them; the message names it. Nothing is changed then.
    """
    if _before:
        return
    wanted = _replacements()
    replaced = {place: getattr(*place, _MISSING) for place in wanted}
    late = _imported_before(replaced)
    if late:
        raise ConfigurationError(
            "pypipe.compat.install() comes too late for modules that have torch's own classes already: "
            f"{'; '.join(late)}. Call it before they are imported"
        )
    _before.update(replaced)
    for (module, name), value in wanted.items():
        setattr(module, name, value)


def uninstall() -> None:
    """Gives torch its own names back. Idempotent.

    Modules that were imported in between keep pypipe's classes, and schedules go on.
    """
    for (module, name), value in _before.items():
        if value is _MISSING:
            delattr(module, name)
        else:
            setattr(module, name, value)
    _before.clear()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """install(), and uninstall() at the end of the block, unless pypipe was installed before it.

    Raises:
        ConfigurationError: as install() raises it.
    """
    was = bool(_before)
    install()
    try:
        yield
    finally:
        if not was:
            uninstall()
