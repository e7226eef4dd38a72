"""Tensors without values: what weights and all that depends on them are in a dry run.

A hollow tensor has a shape, a dtype and the device that it stands for, and computes on the meta device. Tensors that
depend on no weight are real in a dry run, so that a model may look at a mask's values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pypipe.runtime.torch_private import (
    TorchDispatchMode,
    no_torch_function,
    pytree,
    storage_key,
    wrapper_tensor,
)
from pypipe.splitting.operations import is_only_made_like
from pypipe.splitting.plan import Unsplittable

__all__ = ["Hollow", "HollowMode", "emptied", "key_of"]

_META = torch.device("meta")


class Hollow(Tensor):
    """A tensor on the meta device that says it is on another one."""

    body: Tensor

    @staticmethod
    def __new__(cls, body: Tensor, device: torch.device) -> Hollow:  # noqa: D102
        made: Hollow = wrapper_tensor(cls, body, device)
        made.body = body
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Hollow({list(self.shape)}, {self.dtype}, {self.device})"

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError("a hollow tensor outlived its dry run")


def emptied(tensor: Tensor, device: torch.device) -> Hollow:
    """A hollow tensor with the shape, the strides and the dtype of this one."""
    return Hollow(_meta(tensor), device)


def key_of(tensor: Tensor) -> int | None:
    """Equal for two tensors that share memory, or would; None where a tensor has no storage."""
    plain = tensor.body if isinstance(tensor, Hollow) else tensor
    try:
        return storage_key(plain)
    except (RuntimeError, NotImplementedError):
        return None


def _meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Hollow):
        return tensor.body
    if tensor.layout != torch.strided:
        return tensor.to(_META)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _zeros(tensor: Tensor) -> Tensor:
    """What stands for values that have to be looked at."""
    if isinstance(tensor, Hollow):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor


class HollowMode(TorchDispatchMode):
    """Runs operations on hollow tensors.

    Args:
        device: where hollow tensors say that they are.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.looked = 0  # how often values had to be invented

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {}, made_real=False)

    def look(self, func: Any) -> None:
        """Called where a computation depends on the values of a hollow tensor."""
        self.looked += 1

    def guarded(self, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module's call; where it fails on values that are not there, a result as large as its first tensor.

        That is right for modules such as a choice of experts, which return what they were given the shape of.
        """
        before = self.looked
        try:
            return call(module, *args, **kwargs)
        except Unsplittable:
            raise
        except Exception as error:
            invented = self.looked > before or isinstance(error, NotImplementedError) or "subclass" in str(error)
            like = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            if not invented or like is None:
                raise
            return emptied(like, self.device)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], *, made_real: bool) -> Any:
        """The operation's result: hollow where an argument is.

        Args:
            made_real: whether tensors that are only made like a hollow one (zeros_like) are real.
        """
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(leaf, Hollow) for leaf in leaves):
            return func(*args, **kwargs)
        if made_real and is_only_made_like(func):
            return self._with_zeros(func, args, kwargs)
        if torch.Tag.data_dependent_output not in func.tags:
            try:
                return self._without_values(func, args, kwargs)
            except RuntimeError as error:  # also a NotImplementedError
                if torch.Tag.dynamic_output_shape not in func.tags:
                    return self._after(error, func, args, kwargs)
        self.look(func)
        return self._with_zeros(func, args, kwargs)

    def _after(self, error: RuntimeError, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the operation gives for zeros, where the meta device has none or can do less than the device itself."""
        try:
            return self._with_zeros(func, args, kwargs)
        except Exception:
            raise error from None

    def _with_zeros(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, _zeros, (args, kwargs))
        return func(*args, **kwargs)

    def _without_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given: dict[int, Tensor] = {}  # what an operation in place returns is the tensor itself
        kept = []

        def lowered(tensor: Tensor) -> Tensor:
            inner = _meta(tensor)
            given[id(inner)] = tensor
            kept.append(inner)
            return inner

        args, kwargs = pytree.tree_map_only(Tensor, lowered, (args, kwargs))
        device = self.device
        if kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            kwargs = {**kwargs, "device": _META}

        def raised(tensor: Tensor) -> Tensor:
            its = given.get(id(tensor))
            return its if its is not None else Hollow(tensor, device)

        return pytree.tree_map_only(Tensor, raised, func(*args, **kwargs))
