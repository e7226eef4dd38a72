"""What a module would return, as far as shapes go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pypipe.runtime.batch.structure import map_tensors
from pypipe.runtime.torch_private import pytree
from pypipe.splitting.hollow import HollowMode, emptied
from pypipe.splitting.untouched import calls_through, lent

__all__ = ["Shapes", "blank"]


def blank(tensor: Tensor, device: torch.device) -> Tensor:
    """NaN of a tensor's shape and dtype (zeros of an integer one), which takes the memory of one element."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)


class Shapes:
    """What a module would return, as far as shapes go; found out once for each kind of arguments.

    Args:
        module: the module; its weights may be on the meta device.
        device: where the results are.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = (module,)  # not as an attribute, so that nothing takes it for a part of the stage
        self._device = device
        self._known: dict[Any, Any] = {}

    def find(self, args: Any, kwargs: Any, context: Any) -> Any:
        """What the module would return: blank tensors in the place of its own."""
        key = (context, _signature(args), _signature(kwargs) if kwargs else None)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = (self._run(args, kwargs),)
        return found[0]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, args: Any, kwargs: Any) -> Any:
        device = self._device
        mode = HollowMode(device)

        (module,) = self._module
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: emptied(tensor, device), (args, kwargs))
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            lent(module, lambda _, tensor: emptied(tensor, device), device, hooks=False),
            calls_through(mode.guarded),
            mode,
        ):
            output = module(*args, **kwargs)
        return map_tensors(output, lambda tensor: blank(tensor, tensor.device))


_PLAIN = frozenset([type(None), bool, int, float, str])


def _signature(value: Any) -> Any:
    """Equal for arguments that give results of the same shapes."""
    kind = type(value)
    if kind is Tensor:
        return value.shape, value.dtype
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        return tuple([_signature(item) for item in value])
    if kind is dict:
        return tuple([(key, _signature(item)) for key, item in value.items()])
    return (value.shape, value.dtype) if isinstance(value, Tensor) else kind
