"""`.grad` of parameters around a call that may add to it: whether it has, and what, apart from what was there."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

__all__ = ["GradientWatch", "GradientsSetAside", "trained_parameters"]


class GradientWatch:
    """Gradients of parameters, which tell whether anything has been added to them."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]  # they may be replaced between steps

    def state(self, leaves: Iterable[Tensor] = ()) -> list[tuple[int, int]]:
        """The same twice, if nothing has been added to them, or to these leaves, meanwhile."""
        watched: list[Tensor | None] = [*leaves, *(reference() for reference in self._parameters)]
        gradients = [None if tensor is None else tensor.grad for tensor in watched]
        return [(0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


class GradientsSetAside:
    """`.grad` of parameters, while the loss function runs."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._before = [(parameter, parameter.grad) for parameter in trained_parameters(modules)]
        for parameter, _ in self._before:
            parameter.grad = None

    def add(self, weight: float) -> bool:
        """Puts what there was back, with what has come weighted; returns whether anything has."""
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
        """Puts what there was back."""
        for parameter, before in self._before:
            parameter.grad = before


def trained_parameters(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Those that require a gradient, each once."""
    return list({id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values())
