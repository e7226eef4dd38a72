"""The state of a pipeline under global names, for torch.distributed.checkpoint: saved at any layout, loaded at any."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from pypipe.base_schedule import Schedule, pipeline_of, stages_of
from pypipe.errors import ConfigurationError
from pypipe.runtime.rendezvous.agree import gather
from pypipe.runtime.step.optimizer_state import (
    agreed_options,
    flat_state,
    load_flat_state,
    require_fitting,
    wanted_keys,
)
from pypipe.runtime.step.tied_parameters import TIE
from pypipe.stage import PipelineStage

__all__ = ["get_state", "set_state"]

_SHOWN = 5


class _Layout:
    """What this rank's stages and all others hold, by global name.

    Attributes:
        everywhere: every global name that a stage of the pipeline has.
        names: for each parameter of this rank, the name of its optimizer's state: for a tied one that of the first.
        states: for each of this rank's stages, its state under local names.
    """

    def __init__(self, schedule: Schedule, optimizer: Any) -> None:
        self._schedule = schedule
        self.stages: Sequence[PipelineStage] = stages_of(schedule)
        self.optimizers = _listed(optimizer)
        world = self.stages[0].world
        self.where = f"rank {world.rank}"
        self.states: list[dict[str, Any]] = []
        own: dict[Tensor, str] = {}
        held: list[Any] = []
        failed: Exception | None = None
        try:
            held, problem = self._look(own)
        except Exception as error:  # the others must not wait for this rank
            failed, problem = error, f"{self.where}: its state cannot be had: {type(error).__name__}: {error}"
        answers = self._gather((held, problem))
        if failed is not None:
            raise failed
        self.raise_first(answer[1] for answer in answers)
        pieces = sorted(
            ((piece, names) for answer in answers for piece, names in answer[0]), key=lambda entry: entry[0]
        )
        owners: dict[str, tuple[int, str | None]] = {}
        first_of: dict[str, str] = {}
        for piece, names in pieces:
            for name, key in names:
                other, other_key = owners.setdefault(name, (piece, key))
                if other != piece and (key is None or key != other_key):
                    raise ConfigurationError(
                        f"stages {other} and {piece} both have {name!r}, and are not one tied weight: give each stage "
                        "the names that the whole model has, with PipelineStage(..., prefix=)"
                    )
                if key is not None:
                    first_of.setdefault(key, name)
        self.everywhere = set(owners)
        self.names = {p: first_of.get(getattr(p, TIE, None) or "", name) for p, name in own.items()}

    def _look(self, own: dict[Tensor, str]) -> tuple[list[Any], str]:
        """Returns each stage's names with the keys of their ties, and what is wrong; fills in parameters' names."""
        held = []
        self.states = [_state_of(stage) for stage in self.stages]
        for stage, state in zip(self.stages, self.states, strict=True):
            ties = {}
            for local, parameter in stage.submod.named_parameters(remove_duplicate=False):
                name = stage.names.of(stage.names.local_of(local))
                own.setdefault(parameter, name)
                if (key := getattr(parameter, TIE, None)) is not None:
                    ties[name] = key
            held.append((stage.stage_index, [(name, ties.get(name)) for name in map(stage.names.of, state)]))
        unknown = [
            f"parameter {number} of group {index} (shape {tuple(p.shape)})"
            for each in self.optimizers
            for index, group in enumerate(each.param_groups)
            for number, p in enumerate(group["params"])
            if p not in own
        ]
        problem = f"{self.where}: the optimizer holds what no stage of this rank has: {_few(unknown)}"
        return held, problem if unknown else ""

    def _gather(self, value: Any) -> list[Any]:
        return gather(self.stages[0].world, "pypipe.checkpoint", value, pipeline_of(self._schedule).timeout)

    def agree(self, problem: str) -> None:
        """Raises on every rank what any of them found."""
        self.raise_first(self._gather(problem))

    @staticmethod
    def raise_first(problems: Iterable[str]) -> None:
        for problem in problems:
            if problem:
                raise ConfigurationError(problem)


def _state_of(stage: PipelineStage) -> dict[str, Any]:
    # torch takes an empty state for a mistake.
    return get_model_state_dict(stage.submod) if stage.submod.state_dict() else {}


def _listed(optimizer: Any) -> list[Optimizer]:
    return [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _few(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def get_state(
    schedule: Schedule,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scaler: Any = None,
    lr_scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `torch.distributed.checkpoint.save()` writes, and `load()` fills in place. Every rank calls it.

    Tensors are the model's and the optimizer's own, not copies. A parameter that the optimizer has not stepped has the
    state of a first step with a zero gradient, at step 0; the optimizer itself is left as it is.

    Args:
        schedule: whose stages are saved.
        optimizer: of this rank's stages; or a list of them; or None on a rank that has none.
        scaler, lr_scheduler: what has state_dict(), the same on every rank.
        extra: whatever else is to be saved, the same on every rank.

    Returns:
        "model": tensors by global name; "optimizer": `state.<name>.<entry>` and `param_groups.<name>.<option>`, as
        torch's get_state_dict() with flatten_optimizer_state_dict=True has them; "scaler", "lr_scheduler", "extra"
        where they are given.

    Raises:
        ConfigurationError: on every rank: two stages have one name and it is no tied weight, or an optimizer holds a
            parameter of no stage.
    """
    layout = _Layout(schedule, optimizer)
    model = {
        stage.names.of(local): value
        for stage, state in zip(layout.stages, layout.states, strict=True)
        for local, value in state.items()
    }
    result: dict[str, Any] = {"model": model, "optimizer": flat_state(layout.optimizers, layout.names)}
    for key, part in (("scaler", scaler), ("lr_scheduler", lr_scheduler)):
        if part is not None:
            result[key] = part.state_dict()
    if extra is not None:
        result["extra"] = dict(extra)
    return result


def set_state(
    schedule: Schedule,
    state: Mapping[str, Any],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scaler: Any = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> None:
    """Puts a state into the stages and the optimizer. Every rank calls it.

    Args:
        schedule: whose stages are loaded.
        state: what get_state() returned and `torch.distributed.checkpoint.load()` filled; or the whole model's.
        optimizer, scaler, lr_scheduler: as for get_state().
        strict: whether a name that is missing, or that no stage has, is an error.

    Raises:
        ConfigurationError: on every rank: names are missing or unexpected, or as for get_state(). Nothing is changed.
    """
    layout = _Layout(schedule, optimizer)
    model, flat = state.get("model", {}), state.get("optimizer", {})
    problem = _differences(layout, model, flat) if strict else ""
    for stage, own in zip(layout.stages, layout.states, strict=True):
        for local, value in own.items():
            given = model.get(stage.names.of(local))
            if isinstance(value, Tensor) and isinstance(given, Tensor) and given.shape != value.shape:
                problem = problem or (
                    f"{layout.where}, stage {stage.stage_index}: {stage.names.of(local)!r} has shape "
                    f"{tuple(value.shape)}, but {tuple(given.shape)} in the state"
                )
    layout.agree(problem or _attempt(layout.where, lambda: _require_loadable(layout, flat)))
    for stage, own in zip(layout.stages, layout.states, strict=True):
        mine = {local: model[stage.names.of(local)] for local in own if stage.names.of(local) in model}
        if mine:
            set_model_state_dict(stage.submod, mine, options=StateDictOptions(strict=strict))
    layout.agree(_attempt(layout.where, lambda: load_flat_state(layout.optimizers, layout.names, flat)))
    for key, part in (("scaler", scaler), ("lr_scheduler", lr_scheduler)):
        if part is not None and key in state:
            part.load_state_dict(copy.deepcopy(state[key]))


def _require_loadable(layout: _Layout, flat: Mapping[str, Any]) -> None:
    agreed_options(layout.optimizers, layout.names, flat)
    require_fitting(layout.optimizers, layout.names, flat)


def _attempt(where: str, work: Callable[[], object]) -> str:
    try:
        work()
    except ValueError as error:
        return f"{where}: {error}"
    return ""


def _differences(layout: _Layout, model: Mapping[str, Any], flat: Mapping[str, Any]) -> str:
    for stage, own in zip(layout.stages, layout.states, strict=True):
        missing = [repr(name) for name in map(stage.names.of, own) if name not in model]
        if missing:
            return f"{layout.where}, stage {stage.stage_index}: the state misses {len(missing)} names: {_few(missing)}"
    unexpected = [repr(name) for name in model if name not in layout.everywhere]
    if unexpected:
        return f"{layout.where}: the state has {len(unexpected)} names that no stage has: {_few(unexpected)}"
    missing = [repr(key) for key in wanted_keys(layout.optimizers, layout.names) if key not in flat]
    if missing:
        return f"{layout.where}: the optimizer's state misses {len(missing)} entries: {_few(missing)}"
    return ""
