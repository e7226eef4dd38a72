"""Lends a model to a dry run and leaves it as it was."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["calls_through", "lent"]

_MUTABLE = (dict, OrderedDict, list, set)


@contextlib.contextmanager
def lent(
    model: nn.Module, parameter: Callable[[str, Tensor], Tensor], device: torch.device, *, hooks: bool = True
) -> Iterator[None]:
    """Has other parameters and copies of the buffers in a model; takes back all that is changed in its modules.

    Args:
        model: the model.
        parameter: called with each parameter's name and the parameter; gives what stands for it.
        device: where buffers on the meta device become zeros.
        hooks: whether the modules' hooks run.
    """
    kept = [(module, _attributes(module)) for module in model.modules()]
    made: dict[int, Tensor] = {}
    named = {id(tensor): name for name, tensor in reversed(list(model.named_parameters(remove_duplicate=False)))}
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        try:
            for module, _ in kept:
                module.__dict__["_parameters"] = {
                    name: None if its is None else made.setdefault(id(its), parameter(named[id(its)], its))
                    for name, its in module._parameters.items()
                }
                module.__dict__["_buffers"] = {
                    name: None if its is None else _copy(its, device) for name, its in module._buffers.items()
                }
                if not hooks:
                    module.__dict__["_forward_hooks"] = OrderedDict()
                    module.__dict__["_forward_pre_hooks"] = OrderedDict()
            yield
        finally:
            for module, attributes in kept:
                _put_back(module, attributes)


def _copy(buffer: Tensor, device: torch.device) -> Tensor:
    if buffer.is_meta:
        return torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    return buffer.detach().clone()


def _attributes(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """Each attribute's name, its value, and a copy where the value can be filled."""
    return [(name, value, value.copy() if type(value) in _MUTABLE else None) for name, value in module.__dict__.items()]


def _put_back(module: nn.Module, attributes: list[tuple[str, Any, Any]]) -> None:
    module.__dict__.clear()
    for name, value, content in attributes:
        module.__dict__[name] = value
        if isinstance(content, list):
            value[:] = content
        elif content is not None:
            value.clear()
            value.update(content)


@contextlib.contextmanager
def calls_through(enter: Callable[..., Any]) -> Iterator[None]:
    """Calls of modules go to `enter(module, call, args, kwargs)`, where `call(module, *args, **kwargs)` makes one."""
    call = nn.Module.__call__

    def entered(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return enter(module, call, args, kwargs)

    nn.Module.__call__ = entered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
