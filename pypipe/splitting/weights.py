"""Keeps the weights of a rank's own stages, and lets go of all others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from pypipe.splitting.plan import EVERYWHERE, Plan

__all__ = ["keep_weights"]


def keep_weights(model: nn.Module, plan: Plan, stages: Collection[int], device: torch.device) -> None:
    """Moves the parameters and buffers of these stages to the device, and all others to the meta device.

    Those of them that are on the meta device get memory there, full of NaN (integers: of zeros).
    """
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        is_held = not plan.held[plan.first_names[name]].isdisjoint(stages)
        owner, _, own_name = name.rpartition(".")
        new = made.get(id(parameter))
        if new is None:
            new = made[id(parameter)] = _held(parameter, device) if is_held else _released(parameter)
        model.get_submodule(owner)._parameters[own_name] = new
    on_meta = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    _keep_buffers(model, plan, stages, device, set())
    if on_meta:
        _warn(model, on_meta)


def _warn(model: nn.Module, on_meta: list[str]) -> None:
    """Says which buffers no checkpoint will fill."""
    saved = model.state_dict().keys()
    unsaved = [name for name in on_meta if name not in saved and not model.get_buffer(name).is_meta]
    if unsaved:
        warnings.warn(
            f"split(): the model came from the meta device, and these buffers are in no state_dict: fill them as well, "
            f"by name, in stage.submod.named_buffers(): {', '.join(unsaved)}",
            stacklevel=4,
        )


def _held(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if parameter.is_meta:
        return nn.Parameter(_unset(parameter, device), parameter.requires_grad)
    if parameter.device != device:
        parameter.data = parameter.data.to(device)
    return parameter


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory whose use shows."""
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    is_inexact = tensor.is_floating_point() or tensor.is_complex()
    return made.fill_(float("nan")) if is_inexact else made.zero_()


def _released(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)


def _keep_buffers(module: nn.Module, plan: Plan, stages: Collection[int], device: torch.device, seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    roles = plan.roles.get(id(module))
    if roles is not None:
        is_held = EVERYWHERE in roles or not set(roles).isdisjoint(stages)
        for part in module.modules():
            seen.add(id(part))
            _replace(part, _kept(device) if is_held else _let_go)
        return
    _replace(module, _kept(device))
    for child in module.children():
        _keep_buffers(child, plan, stages, device, seen)


def _replace(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)


def _kept(device: torch.device) -> Callable[[Tensor], Tensor]:
    def kept(buffer: Tensor) -> Tensor:
        return _unset(buffer, device) if buffer.is_meta else buffer.to(device)

    return kept


def _let_go(buffer: Tensor) -> Tensor:
    return torch.empty_like(buffer, device="meta")
