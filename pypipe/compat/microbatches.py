"""One call's microbatches, where the trainer has cut the batch itself: `arg_mbs`, `kwarg_mbs` and `target_mbs`.

What pypipe cuts is a vector with the numbers of the microbatches, and each stage and the loss look up what is theirs
under the number that they get. So microbatches may hold anything, in any shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pypipe.errors import InputError
from pypipe.stage import PipelineStage

__all__ = ["Loss", "Microbatches", "loss_of"]

_NUMBER = "_pypipe_microbatch"


class Microbatches:
    """What one step() or eval() was given on this rank.

    Args:
        count: M.
        args: a tuple for each microbatch, for the first stage.
        kwargs: a dict for each microbatch, for each stage of this rank.
        targets: a target for each microbatch, for the loss.
        problem: what is wrong with the call already. It is raised where the first of this rank's stages is called:
            there an error reaches the other ranks.
    """

    def __init__(
        self,
        count: int,
        args: list[Any] | None,
        kwargs: list[Any] | None,
        targets: list[Any] | None,
        problem: str | None = None,
    ) -> None:
        for name, given in (("arg_mbs", args), ("kwarg_mbs", kwargs), ("target_mbs", targets)):
            if given is not None and not isinstance(given, list):
                problem = f"{name} is a {type(given).__name__}: give a list with an item for each microbatch"
            elif given is not None and len(given) != count:
                problem = f"{name} has {len(given)} items, but the schedule has {count} microbatches: give one for each"
        self._problem = problem
        self._args: list[Any] = args if args is not None else [()] * count
        self._kwargs: list[Any] = kwargs if kwargs is not None else [{}] * count
        self._targets = targets
        self._numbers = torch.arange(count)

    @property
    def kwargs(self) -> dict[str, Tensor]:
        """The keyword arguments of pypipe's step()."""
        return {_NUMBER: self._numbers}

    @property
    def target(self) -> Tensor | None:
        """The target of pypipe's step()."""
        return self._numbers if self._targets is not None else None

    def target_of(self, number: Tensor) -> Any:
        """The target in whose place the number came."""
        assert self._targets is not None
        return self._targets[int(number)]

    @contextlib.contextmanager
    def given_to(self, stages: Sequence[PipelineStage]) -> Iterator[None]:
        """While it lasts, stages that are called with a number get their arguments in its place."""
        with contextlib.ExitStack() as hooks:
            for stage in stages:
                # First of all hooks: FSDP's and the trainer's own see the arguments themselves.
                hook = stage.submod.register_forward_pre_hook(
                    self._hook(stage.is_first), prepend=True, with_kwargs=True
                )
                hooks.callback(hook.remove)
            yield

    def _hook(self, is_first: bool) -> Callable[..., tuple[Any, Any] | None]:
        def substitute(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            if _NUMBER not in kwargs:
                return None
            if self._problem is not None:
                raise InputError(self._problem)
            number = int(kwargs[_NUMBER])
            own = self._args[number]
            if not isinstance(own, tuple):
                own = (own,)
            return (own if is_first else args), self._kwargs[number] or {}

        return substitute


class Loss:
    """The trainer's loss function, which looks targets up where microbatches were given cut.

    Attributes:
        microbatches: the current call's; None where the batch was given whole.
        options: the current call's loss_kwargs; every microbatch gets them whole, as torch gives them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.microbatches: Microbatches | None = None
        self.options: dict[str, Any] = {}

    @contextlib.contextmanager
    def of(self, microbatches: Microbatches, options: dict[str, Any] | None) -> Iterator[None]:
        """While it lasts, targets are looked up."""
        self.microbatches, self.options = microbatches, options or {}
        try:
            yield
        finally:
            self.microbatches, self.options = None, {}

    def __call__(self, output: Any, target: Any, **options: Any) -> Any:
        """The loss of one microbatch."""
        if self.microbatches is not None:
            target, options = self.microbatches.target_of(target), self.options
        return self.function(output, target, **options)


class _LossModule(nn.Module):
    """A loss that is a module, and stays one: it may have parameters."""

    def __init__(self, loss: Loss, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._loss = loss

    def forward(self, output: Any, target: Any, **options: Any) -> Any:
        return self._loss(output, target, **options)


def loss_of(loss: Loss) -> Callable[..., Any]:
    """What the schedule is given as loss_fn."""
    return _LossModule(loss, loss.function) if isinstance(loss.function, nn.Module) else loss
