"""The pipeline implementations under comparison: everything but the import is the same code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from handwired import Boundary, HandwiredPipeline
from torch import Tensor, nn

LossFunction = Callable[[Tensor, Tensor], Tensor]
PACKAGES = {"pypipe": "pypipe", "torch": "torch.distributed.pipelining"}


def make_pipeline(
    name: str,
    module: nn.Module,
    rank: int,
    P: int,
    M: int,
    loss_fn: LossFunction,
    boundaries: list[Boundary],
) -> Pipeline:
    """One contender: "bare", "handwired" (the only one to use ``boundaries``) or a key of PACKAGES."""
    if name == "bare":
        return BarePipeline(module, M, loss_fn)
    if name == "handwired":
        return HandwiredPipeline(module, rank, P, M, loss_fn, boundaries)
    return LibraryPipeline(name, module, rank, P, M, loss_fn)


class Pipeline(Protocol):
    """This rank's part of one contender."""

    def step(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Forward and backward of a batch; on the last rank, the microbatches' losses."""
        ...

    def close(self) -> None:
        """Let go of what the other ranks share."""
        ...


def classes(name: str) -> tuple[Any, Any]:
    """PipelineStage and Schedule1F1B of one of PACKAGES. Any: the two packages share no type."""
    package = importlib.import_module(PACKAGES[name])
    return package.PipelineStage, package.Schedule1F1B


class LibraryPipeline:
    """1F1B on this rank's stage, with the classes of one of PACKAGES."""

    def __init__(self, name: str, module: nn.Module, rank: int, P: int, M: int, loss_fn: LossFunction) -> None:
        PipelineStage, Schedule1F1B = classes(name)
        stage = PipelineStage(module, stage_index=rank, num_stages=P, device=torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, n_microbatches=M, loss_fn=loss_fn)
        self.is_first, self.is_last = rank == 0, rank == P - 1

    def step(self, x: Tensor, y: Tensor) -> list[Tensor]:
        arguments = (x,) if self.is_first else ()
        losses: list[Tensor] = []
        # return_outputs=False: nobody trains with the merged outputs, and merging copies them all.
        if self.is_last:
            self.schedule.step(*arguments, target=y, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*arguments, return_outputs=False)
        return losses

    def close(self) -> None:
        if hasattr(self.schedule, "close"):  # torch's schedules hold nothing that needs it
            self.schedule.close()


class BarePipeline:
    """No pipeline at all: plain autograd over the microbatches, for a stage that is the whole model."""

    def __init__(self, module: nn.Module, M: int, loss_fn: LossFunction) -> None:
        self.module, self.M, self.loss_fn = module, M, loss_fn
        self.parameters = list(module.parameters())

    def step(self, x: Tensor, y: Tensor) -> list[Tensor]:
        losses = []
        for x_m, y_m in zip(x.chunk(self.M), y.chunk(self.M), strict=True):
            loss = self.loss_fn(self.module(x_m), y_m)
            loss.backward()
            losses.append(loss.detach())
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self.M)
        return losses

    def close(self) -> None:
        pass


class StagesByHand:
    """No pipeline, but its stages: each one's forward and backward, or the two halves of it, called one by one.

    Args:
        stages: of the whole model, in order.
        halves: for which stages and microbatches the weights' gradients are computed apart. In such a stage one
            operation has the weights and makes the output: others would run twice.
    """

    def __init__(
        self, stages: Sequence[nn.Module], M: int, loss_fn: LossFunction, halves: Collection[tuple[int, int]] = ()
    ) -> None:
        self.stages, self.M, self.loss_fn, self.halves = list(stages), M, loss_fn, halves
        self.parameters = [list(stage.parameters()) for stage in stages]

    def step(self, x: Tensor, y: Tensor) -> list[Tensor]:
        losses = []
        for m, (x_m, y_m) in enumerate(zip(x.chunk(self.M), y.chunk(self.M), strict=True)):
            inputs, outputs = [x_m], [self.stages[0](x_m)]
            for stage in self.stages[1:]:
                inputs.append(outputs[-1].detach().requires_grad_())
                outputs.append(stage(inputs[-1]))
            loss = self.loss_fn(outputs[-1], y_m)
            losses.append(loss.detach())
            self.backward(m, inputs, outputs, loss)
        for parameters in self.parameters:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.M)
        return losses

    def backward(self, m: int, inputs: list[Tensor], outputs: list[Tensor], loss: Tensor) -> None:
        root, arriving = loss, torch.ones_like(loss)
        for stage in reversed(range(len(self.stages))):
            output = outputs[stage]
            if (stage, m) not in self.halves:
                _run_engine(root, arriving)
                arriving = inputs[stage].grad  # type: ignore[assignment]  # None below the first stage
            else:
                wanted = [*inputs[max(stage, 1) : stage + 1], *([output] if root is loss else [])]
                found = (
                    _run_engine(root, arriving, wanted, keep_graph=True, accumulate=False) if wanted else (arriving,)
                )
                _run_engine(output, found[-1] if root is loss else arriving, self.parameters[stage])
                arriving = found[0]
            root = outputs[stage - 1]

    def close(self) -> None:
        pass


def _run_engine(
    root: Tensor, gradient: Tensor, ends: Sequence[Tensor] = (), *, keep_graph: bool = False, accumulate: bool = True
) -> tuple[Tensor, ...]:
    """What torch.autograd.backward() and grad() do, but for their looks at the arguments, which take microseconds."""
    engine: Any = torch.autograd.Variable._execution_engine
    found: tuple[Tensor, ...] = engine.run_backward(
        (root,), (gradient,), keep_graph, False, tuple(ends), allow_unreachable=True, accumulate_grad=accumulate
    )
    return found
