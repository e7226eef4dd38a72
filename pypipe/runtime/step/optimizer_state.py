"""The state of optimizers by the global names of their parameters, in the flat form of torch.distributed.checkpoint."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from pypipe.runtime.torch_private import OPTIMIZER_HOOKS

__all__ = ["agreed_options", "flat_state", "load_flat_state", "require_fitting", "wanted_keys"]


def _first_state(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """What the optimizer holds of a parameter that it has not stepped yet: tensors to load into.

    torch.distributed.checkpoint loads in place, so they must be there. The optimizer is left alone: a copy of it steps
    a copy of the parameter, and the count of steps is then put back to 0.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # an LR scheduler counts calls there
    for hooks in OPTIMIZER_HOOKS:
        setattr(twin, hooks, OrderedDict())
    leaf = parameter.detach().clone().requires_grad_()
    leaf.grad = torch.zeros_like(leaf)
    twin.state = defaultdict(dict)
    # Cloned, since a step may write to a learning rate that is a tensor.
    twin.param_groups = [{**{key: copy.deepcopy(v) for key, v in group.items() if key != "params"}, "params": [leaf]}]
    twin.step()
    state = dict(twin.state[leaf])
    if "step" in state:
        state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0
    return state


def _entries(optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, dict[str, Any], Tensor]]:
    return [(each, group, p) for each in optimizers for group in each.param_groups for p in group["params"]]


def flat_state(optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]) -> dict[str, Any]:
    """`state.<name>.<entry>` and `param_groups.<name>.<option>` for every parameter."""
    flat: dict[str, Any] = {}
    for optimizer, group, parameter in _entries(optimizers):
        name = names[parameter]
        state = optimizer.state.get(parameter)
        if not state and parameter.requires_grad:
            state = _first_state(optimizer, group, parameter)
        for entry, value in (state or {}).items():
            if value is not None:
                flat[f"state.{name}.{entry}"] = value
        for option, value in group.items():
            if option != "params":
                flat[f"param_groups.{name}.{option}"] = value
    return flat


def wanted_keys(optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]) -> list[str]:
    """The keys that a state must have for these optimizers; those of parameters' states need not be there."""
    return [
        f"param_groups.{names[p]}.{option}"
        for _, group, p in _entries(optimizers)
        for option in group
        if option != "params"
    ]


def _fitted(value: Any, parameter: Tensor, key: str) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    # What has the parameter's shape lies as the parameter does.
    if value.dim() and isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        if value.shape != parameter.shape:
            raise ValueError(f"{key!r} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value.detach().clone()


def agreed_options(
    optimizers: Sequence[Optimizer], names: Mapping[Tensor, str], flat: Mapping[str, Any]
) -> list[tuple[dict[str, Any], str, Any]]:
    """What a flat state says of each group: the group, an option, and its value.

    Raises:
        ValueError: parameters of one group have different values.
    """
    agreed = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        for option in [option for option in group if option != "params"]:
            keys = [(names[p], f"param_groups.{names[p]}.{option}") for p in group["params"]]
            found = [(name, flat[key]) for name, key in keys if key in flat]
            for name, value in found[1:]:
                if not _same(value, found[0][1]):
                    raise ValueError(
                        f"{found[0][0]!r} and {name!r} are in one group of the optimizer, but {option!r} was "
                        f"{found[0][1]!r} for the one and {value!r} for the other"
                    )
            if found:
                agreed.append((group, option, found[0][1]))
    return agreed


def require_fitting(optimizers: Sequence[Optimizer], names: Mapping[Tensor, str], flat: Mapping[str, Any]) -> None:
    """Requires that the states in `flat` have the shapes of these optimizers' own.

    Raises:
        ValueError: one has another shape.
    """
    for key, value in flat_state(optimizers, names).items():
        given = flat.get(key)
        if isinstance(value, Tensor) and isinstance(given, Tensor) and value.shape != given.shape:
            raise ValueError(f"{key!r} has shape {tuple(value.shape)}, but {tuple(given.shape)} in the state")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return bool(a == b)


def load_flat_state(optimizers: Sequence[Optimizer], names: Mapping[Tensor, str], flat: Mapping[str, Any]) -> None:
    """Puts into the optimizers what flat_state() made, maybe of other optimizers that held other parameters.

    Raises:
        ValueError: parameters of one group have different options in `flat`, or a shape is another.
    """
    states: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith("state."):
            name, _, entry = key.removeprefix("state.").rpartition(".")
            states.setdefault(name, {})[entry] = value
    for group, option, value in agreed_options(optimizers, names, flat):
        group[option] = copy.deepcopy(value)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[parameter]
                if name not in states:
                    continue
                before = optimizer.state.get(parameter)
                loaded = {k: _fitted(v, parameter, f"state.{name}.{k}") for k, v in states[name].items()}
                if not before and "step" in loaded and not float(loaded["step"]):
                    continue  # never stepped: the first step makes the state, as it does without a checkpoint
                optimizer.state[parameter] = loaded
