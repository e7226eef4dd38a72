"""Where a model is cut, and which rank holds which stage."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pypipe.splitting.plan import Unsplittable

__all__ = ["find_cuts", "stages_of_rank"]

Placement = str | Sequence[int] | Callable[[int, int], int] | None
Cuts = tuple[list[nn.Module], list[str]]
_SHAPES = ("loop", "v", "bidirectional")


def stages_of_rank(placement: Placement, count: int, rank: int, size: int) -> list[int]:
    """Which stages a rank holds, in the order in which the schedules want them.

    Raises:
        Unsplittable: the placement and the number of stages do not fit the number of ranks.
    """
    placement = "loop" if placement is None else placement
    if isinstance(placement, str):
        if placement not in _SHAPES:
            raise Unsplittable(
                f'placement is {placement!r}: it takes "loop", "v", "bidirectional", a list or a function'
            )
        if placement == "loop":
            if count % size:
                raise Unsplittable(
                    f"the model is cut into {count} stages, and there are {size} ranks: cut it into a multiple of "
                    f"{size}, or give placement= the rank of each stage"
                )
            return list(range(rank, count, size))
        wanted = 2 * size if placement == "v" else size
        if count != wanted:
            raise Unsplittable(
                f"the model is cut into {count} stages, and {placement!r} places {wanted} on {size} ranks: name "
                f"{wanted - 1} modules"
            )
        return [rank, 2 * size - 1 - rank] if placement == "v" else [rank, size - 1 - rank]
    ranks = [placement(stage, size) for stage in range(count)] if callable(placement) else list(placement)
    if len(ranks) != count or any(type(each) is not int or not 0 <= each < size for each in ranks):
        raise Unsplittable(
            f"placement gives {ranks}: it takes the rank of each of {count} stages, from 0 to {size - 1}"
        )
    idle = sorted(set(range(size)) - set(ranks))
    if idle:
        raise Unsplittable(f"placement gives {ranks}: rank {', '.join(map(str, idle))} has no stage")
    return [stage for stage, its in enumerate(ranks) if its == rank]


def find_cuts(model: nn.Module, at: Any, placement: Placement, size: int) -> Cuts:
    """The modules before which the model is cut, and their names.

    Raises:
        Unsplittable: a name that no module has, or too few modules.
    """
    names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    if at is None:
        at = _default(model)
    if isinstance(at, str) and isinstance(_find(model, at), nn.ModuleList):
        at = _find(model, at)
    if isinstance(at, nn.ModuleList):
        return _evenly(at, names, placement, size)
    if isinstance(at, (str, nn.Module)):
        at = [at]
    cuts: list[nn.Module] = []
    for each in at:
        module = _find(model, each) if isinstance(each, str) else each
        if not isinstance(module, nn.Module) or id(module) not in names:
            raise Unsplittable(f"at= takes names of the model's modules, or the modules; {each!r} is none")
        if module is model:
            raise Unsplittable("at= names the model itself; the first stage begins there anyway")
        if any(module is other for other in cuts):
            raise Unsplittable(f"at= names {names[id(module)]} twice")
        cuts.append(module)
    return cuts, [names[id(module)] for module in cuts]


def _find(model: nn.Module, name: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name not in modules or not name:
        close = difflib.get_close_matches(name, list(modules), 3, 0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise Unsplittable(f"{type(model).__name__} has no module {name!r}{hint}")
    module: nn.Module = modules[name]
    return module


def _evenly(modules: nn.ModuleList, names: dict[int, str], placement: Placement, size: int) -> Cuts:
    if isinstance(placement, Sequence) and not isinstance(placement, str):
        count = len(placement)
    else:
        count = 2 * size if placement == "v" else size
    where = names.get(id(modules))
    if where is None:
        raise Unsplittable("at= is a ModuleList that is not a part of the model")
    if len(modules) < count:
        raise Unsplittable(f"{where} has {len(modules)} modules, which cannot be cut into {count} stages")
    cuts = [modules[round(part * len(modules) / count)] for part in range(1, count)]
    return cuts, [names[id(module)] for module in cuts]


def _default(model: nn.Module) -> nn.ModuleList:
    """The layers that a Hugging Face configuration names, else the longest ModuleList."""
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    base = getattr(model, "base_model", model)
    for name in plan:
        found = getattr(base, name, None)
        if isinstance(found, nn.ModuleList):
            return found
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise Unsplittable(f"{type(model).__name__} has no ModuleList: name the modules that begin a stage in at=")
    return max(lists, key=len)
