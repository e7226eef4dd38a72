"""What stands where another stage's module is: no weights, no computation, results of the right shapes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pypipe.errors import ConfigurationError
from pypipe.runtime.batch.structure import map_tensors, open_node
from pypipe.splitting.plan import EVERYWHERE, Value
from pypipe.splitting.shapes import Shapes

__all__ = ["Interception", "Run", "Stop", "intercepting"]


class Stop(BaseException):
    """Ends a stage's forward: the module that is called is the next stage's."""


class Run:
    """One forward of a stage, while it runs."""

    def __init__(self) -> None:
        self.active = False
        self.calls: dict[str, int] = {}
        self.received: dict[Value, Any] = {}
        self.taken: dict[Value, Any] = {}
        self.grad = False
        self.context: Any = None

    def begin(self, received: dict[Value, Any], device: str) -> None:
        """Starts a forward with what the stage before sent."""
        self.active = True
        self.received = received
        self.grad = torch.is_grad_enabled()
        self.context = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def end(self) -> None:
        """Forgets the forward."""
        self.active = False
        self.calls = {}
        self.received = {}
        self.taken = {}


def _tensors_of(tree: Any) -> list[Tensor]:
    """The tensors that a module returned, in map_tensors()'s order."""
    if isinstance(tree, Tensor):
        return [tree]
    node = open_node(tree)
    return [] if node is None else [tensor for value in node.values for tensor in _tensors_of(value)]


@functools.cache
def intercepting(kind: Any) -> Any:
    """A class like `kind` whose calls go through the Interception that its object has."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_interception"](self, kind.__call__, args, kwargs)

    members = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), members)


def _is_in_checkpoint() -> bool:
    """Whether the code that runs now was called by torch.utils.checkpoint."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


class Interception:
    """What a call of a module does in one stage: compute, stand in, or end the stage's forward.

    Args:
        run: the stage's forward.
        stage: which stage it is.
        name: the module's.
        roles: the stage of each of its calls.
        received: for each call, what of its results arrives, by the tensor's number among them.
        sent: for each call, what of its results is sent on, and whether the model changes that in place afterwards.
        shapes: of what the module returns.
        rewritten: numbers of the tensors that the model changes in place.
    """

    def __init__(
        self,
        run: Run,
        stage: int,
        name: str,
        roles: Sequence[int],
        received: Mapping[int, Mapping[int, Value]],
        sent: Mapping[int, Sequence[tuple[int, Value, bool]]],
        shapes: Shapes,
        rewritten: frozenset[int],
    ) -> None:
        self._run = run
        self._stage = stage
        self._name = name
        self._roles = roles
        self._mixed = len(set(roles)) > 1
        self._received = received
        self._sent = sent
        self._shapes = shapes
        self._rewritten = rewritten
        self._is_one_tensor = False

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call's result in this stage."""
        run = self._run
        roles = self._roles
        if not run.active:  # activation checkpointing runs a module again in the backward
            if self._stage in roles or EVERYWHERE in roles:
                return call(module, *args, **kwargs)
            raise ConfigurationError(
                f"stage {self._stage}: {self._name}, which stage {roles[0]} computes, is called outside of a forward: "
                "a cut within a checkpointed block cannot be run again; cut before the block"
            )
        number = run.calls.get(self._name, 0)
        run.calls[self._name] = number + 1
        if number >= len(roles) and self._mixed:
            raise ConfigurationError(
                f"stage {self._stage}: {self._name} is called more often than in the example ({len(roles)} times), and "
                "its calls are in several stages: give split() an example with as many calls"
            )
        role = roles[number] if number < len(roles) else roles[-1]
        if role == self._stage:
            output = call(module, *args, **kwargs)
            wanted = self._sent.get(number)
            if wanted is not None:
                self._take(output, wanted)
            return output
        if role == EVERYWHERE:
            return call(module, *args, **kwargs)
        if role > self._stage:
            raise Stop
        return self._stand_in(number, args, kwargs)

    def _take(self, output: Any, wanted: Sequence[tuple[int, Value, bool]]) -> None:
        run = self._run
        tensors = _tensors_of(output)
        if run.grad and not torch.is_grad_enabled() and _is_in_checkpoint():
            raise ConfigurationError(
                f"stage {self._stage}: {self._name}, whose output goes to the next stage, runs without a graph, as in "
                "a reentrant checkpoint: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        for leaf, value, changes in wanted:
            if leaf >= len(tensors):
                raise ConfigurationError(
                    f"stage {self._stage}: {self._name} returned {len(tensors)} tensors, and {value} is to be sent: "
                    "the model computes something else than it did with the example; give split() another one"
                )
            run.taken[value] = tensors[leaf].clone() if changes else tensors[leaf]

    def _stand_in(self, number: int, args: Any, kwargs: Any) -> Any:
        run = self._run
        values = self._received.get(number)
        if values is not None and self._is_one_tensor:
            return self._arrived(values[0])
        output = self._shapes.find(args, kwargs, run.context)
        if isinstance(output, Tensor):
            if values is not None:
                self._is_one_tensor = True
                return self._arrived(values[0])
            return torch.zeros(output.shape, dtype=output.dtype, device=output.device) if self._rewritten else output
        if (
            values is None
            and not self._rewritten
            and type(output) is tuple
            and all(isinstance(o, Tensor) for o in output)
        ):
            return output
        leaf = -1

        def filled(tensor: Tensor) -> Tensor:
            nonlocal leaf
            leaf += 1
            if values is not None and leaf in values:
                return self._arrived(values[leaf])
            if leaf in self._rewritten:
                return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            return tensor.view_as(tensor)

        return map_tensors(output, filled)

    def _arrived(self, value: Value) -> Tensor:
        """What arrived; a copy where the model changes it in place, since it may have to be sent on as it came."""
        received: Tensor = self._run.received[value]
        return received.clone() if value.leaf in self._rewritten else received
