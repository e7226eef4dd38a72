"""Keeps track of parameters' `.grad` around a call that may add to it: whether it has, and how much."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

__all__ = ["GradientWatch", "GradientsSetAside", "trained_parameters"]


class GradientWatch:
    """Watches the gradients of parameters for anything that is added to them."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]  # they may be replaced between steps

    def state(self, leaves: Iterable[Tensor] = ()) -> list[tuple[int, int]]:
        """Returns a value that is the same twice if nothing was added to them, or to these leaves, in between."""
        watched: list[Tensor | None] = [*leaves, *(reference() for reference in self._parameters)]
        gradients = [None if tensor is None else tensor.grad for tensor in watched]
        return [(0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


class GradientsSetAside:
    """Sets parameters' `.grad` aside while the loss function runs."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._before = [(parameter, parameter.grad) for parameter in trained_parameters(modules)]
        for parameter, _ in self._before:
            parameter.grad = None

    def add(self, weight: float) -> bool:
        """Puts the old gradients back and adds the new ones, weighted; returns whether there were any."""
        found = False
        for parameter, before in self._before:
            new = parameter.grad
            if new is None:
                parameter.grad = before
                continue
            found = True
            new = new if weight == 1.0 else new * weight
            parameter.grad = new if before is None else before + new
        return found

    def take_back(self) -> None:
        """Puts the old gradients back, without the new ones."""
        for parameter, before in self._before:
            parameter.grad = before


def trained_parameters(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Lists the parameters that require a gradient, each once."""
    return list({id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values())
