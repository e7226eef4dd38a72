"""The model's inputs: what they are called, and how they get to later stages.

Each stage runs the model's forward() from its inputs on, so all of them travel with the values: tensors, numbers,
strings, None, and tuples, lists and dicts of them. Of a floating-point tensor whose values no later stage needs, only
the shape does. What a rank is given as a keyword argument itself is used there instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pypipe.errors import InputError
from pypipe.splitting.plan import Plan

__all__ = ["bound", "packed", "positional_names", "unpacked"]

_BLANK = "pypipe.blank"
_PLAIN = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype)


def positional_names(model: nn.Module) -> tuple[str, ...]:
    """What forward() calls its positional arguments."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # not written in Python
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def bound(names: Sequence[str], count: int) -> list[str]:
    """Names of so many positional arguments; `*0`, `*1`, ... where forward() has none for them."""
    return [names[i] if i < len(names) else f"*{i}" for i in range(count)]


def packed(
    known: Sequence[str], plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any], list[str]]:
    """The inputs as they travel, and names of those that cannot.

    Raises:
        InputError: a positional argument cannot travel.
    """
    names = bound(known, len(args))
    sent = []
    for name, value in zip(names, args, strict=True):
        if not _can_travel(value):
            raise InputError(
                f"the model's argument {name} is a {type(value).__qualname__}, which cannot be sent to the next stage: "
                f"pass {name}= on every rank"
            )
        sent.append(_as_sent(plan, name, value))
    named = {name: _as_sent(plan, name, value) for name, value in kwargs.items() if _can_travel(value)}
    return sent, named, [name for name in kwargs if name not in named]


def unpacked(
    known: Sequence[str], packet: Sequence[Any], own: Mapping[str, Any], stage: int, device: torch.device
) -> tuple[list[Any], tuple[Any, ...], dict[str, Any]]:
    """What arrived: the values, and the model's arguments.

    Raises:
        InputError: an argument could not travel, and this rank was not given it.
    """
    values, sent, named, absent = packet
    missing = [name for name in absent if name not in own]
    if missing:
        raise InputError(
            f"stage {stage} runs the model's forward() and needs {', '.join(missing)}, which cannot be sent from stage "
            "to stage: pass it to step() on every rank"
        )
    args = [_as_received(value, device) for value in sent]
    kwargs = {name: _as_received(value, device) for name, value in named.items() if name not in own}
    if own:
        positions = {name: position for position, name in enumerate(bound(known, len(args)))}
        for name, value in own.items():
            if name in positions:
                args[positions[name]] = value
            else:
                kwargs[name] = value
    return values, tuple(args), kwargs


def _can_travel(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_nested and value.layout == torch.strided
    if type(value) in (tuple, list):
        return all(_can_travel(item) for item in value)
    if type(value) is dict:
        return all(_can_travel(item) for item in value.values())
    return type(value) in _PLAIN


def _as_sent(plan: Plan, name: str, value: Any) -> Any:
    if (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and name in plan.known_inputs
        and name not in plan.inputs
    ):
        return {_BLANK: value.shape, "dtype": value.dtype}
    return value


def _as_received(value: Any, device: torch.device) -> Any:
    if type(value) is dict and _BLANK in value:
        return torch.full((), float("nan"), dtype=value["dtype"], device=device).expand(value[_BLANK])
    return value
