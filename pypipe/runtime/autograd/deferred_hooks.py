"""Defers hooks of accumulated gradients (Tensor.register_post_accumulate_grad_hook) to the end of a step.

Without a pipeline such a hook runs once per backward, with the batch's whole gradient, and an optimizer that steps in
the backward relies on that. Here a batch has M backwards, each of which adds a part. So the hooks are set aside for the
length of a step, and run once at its end, with the whole gradient.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DeferredHooks"]


class DeferredHooks:
    """The deferred hooks of one stage."""

    def __init__(self) -> None:
        self._set_aside: list[tuple[Tensor, dict[int, Any]]] = []

    def begin(self, module: nn.Module) -> None:
        """Sets the hooks of a module's parameters aside."""
        for parameter in module.parameters():
            hooks = _get(parameter)
            if hooks:
                self._set_aside.append((parameter, hooks))
                _set(parameter, OrderedDict())  # None would not take them away

    @torch.no_grad()
    def run(self) -> None:
        """Runs the hooks of those parameters that have a gradient, and gives them back."""
        set_aside = list(self._set_aside)
        self.give_back()
        for parameter, hooks in set_aside:
            if parameter.grad is not None:
                for hook in list(hooks.values()):
                    hook(parameter)

    def give_back(self) -> None:
        """Gives the hooks back without running them. Idempotent."""
        set_aside, self._set_aside = self._set_aside, []
        for parameter, hooks in set_aside:
            hooks.update(_get(parameter))  # registered meanwhile
            _set(parameter, hooks)


def _get(parameter: Any) -> dict[int, Any]:
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
    return hooks


def _set(parameter: Any, hooks: dict[int, Any]) -> None:
    parameter._post_accumulate_grad_hooks = hooks
