"""Scripts for torch.distributed.pipelining that take the module they import from; what they compute is returned.

Only what torch computes correctly is asked of them: M >= P, batches that M divides, one step() per zero_grad().
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed.pipelining
from swap_models import (
    CPU,
    ROWS,
    WIDTH,
    Layer,
    M,
    Pair,
    Results,
    Scaled,
    TimeFirst,
    Tokens,
    data,
    gradients_of,
    module_of,
)
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional

import pypipe


def training_in_torchs_form(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """x on the first rank, target and losses on the last, nothing in between; three optimizer steps."""
    module = module_of(Layer, rank)
    stage = lib.PipelineStage(module, rank, size, CPU, group=group)
    schedule = getattr(lib, name)(stage, M, loss_fn=functional.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    found: Results = {}
    for number in range(3):
        optimizer.zero_grad()
        losses: list[Tensor] = [torch.tensor(9.0)]  # what was in the list before is dropped
        if stage.is_first:
            output = schedule.step(data(number, ROWS, WIDTH))
        elif stage.is_last:
            output = schedule.step(target=data(10 + number, ROWS, WIDTH), losses=losses)
            found[f"losses {number}"] = torch.stack(losses)
        else:
            output = schedule.step()
        found[f"output {number}"] = output
        found[f"gradients {number}"] = gradients_of(module)
        optimizer.step()
    found["state"] = list(module.state_dict().values())
    return found


def one_line_for_every_rank(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """The same training; pypipe also takes the same line on every rank."""
    if lib is not pypipe:
        return training_in_torchs_form(lib, rank, size, group, name)
    module = module_of(Layer, rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group), n_microbatches=M, loss_fn=functional.mse_loss
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    found: Results = {}
    for number in range(3):
        losses: list[Tensor] = []
        output = schedule.step(data(number, ROWS, WIDTH), target=data(10 + number, ROWS, WIDTH), losses=losses)
        if losses:
            found[f"losses {number}"] = torch.stack(losses)
        found[f"output {number}"] = output
        found[f"gradients {number}"] = gradients_of(module)
        optimizer.step()
        optimizer.zero_grad()
    found["state"] = list(module.state_dict().values())
    return found


def shapes_given_in_advance(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """input_args and output_args, as scripts give them to spare torch its shape inference."""
    module = module_of(Layer, rank)
    example = torch.zeros(ROWS // M, WIDTH, dtype=torch.float64, requires_grad=rank > 0)
    stage = lib.PipelineStage(
        module, rank, size, CPU, input_args=(example,), output_args=(module(example),), group=group
    )
    schedule = getattr(lib, name)(stage, M, functional.mse_loss)
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(data(1, ROWS, WIDTH))
    elif rank == size - 1:
        schedule.step(target=data(2, ROWS, WIDTH), losses=losses)
    else:
        schedule.step()
    return {"losses": losses, "gradients": gradients_of(module)}


def keyword_arguments_per_stage(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """Each stage takes the keyword arguments that its own rank passes."""
    module = module_of(Scaled, rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=functional.mse_loss
    )
    scale = data(20 + rank, ROWS, 1)
    losses: list[Tensor] = []
    if rank == 0:
        output = schedule.step(data(1, ROWS, WIDTH), scale=scale)
    elif rank == size - 1:
        output = schedule.step(target=data(2, ROWS, WIDTH), losses=losses, scale=scale)
    else:
        output = schedule.step(scale=scale)
    return {"losses": losses, "output": output, "gradients": gradients_of(module)}


def keyword_chunk_specs(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """Keyword arguments that are cut along another dimension."""

    class Transposed(Scaled):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return super().forward(x, scale=scale.t())

    module = module_of(Transposed, rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group),
        M,
        loss_fn=functional.mse_loss,
        kwargs_chunk_spec={"scale": TensorChunkSpec(1)},
    )
    scale = data(20 + rank, WIDTH, ROWS)
    if rank == 0:
        output = schedule.step(data(1, ROWS, WIDTH), scale=scale)
    elif rank == size - 1:
        output = schedule.step(target=data(2, ROWS, WIDTH), scale=scale)
    else:
        output = schedule.step(scale=scale)
    return {"output": output, "gradients": gradients_of(module)}


def two_tensors_across_boundaries(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """Stages that take and return two tensors."""
    module = module_of(lambda: Pair(rank == size - 1), rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=functional.mse_loss
    )
    losses: list[Tensor] = []
    if rank == 0:
        output = schedule.step(data(1, ROWS, WIDTH), data(2, ROWS, WIDTH))
    elif rank == size - 1:
        output = schedule.step(target=data(3, ROWS, WIDTH), losses=losses)
    else:
        output = schedule.step()
    return {"losses": losses, "output": output, "gradients": gradients_of(module)}


def batch_along_dimension_1(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """args_chunk_spec with torch's own TensorChunkSpec."""
    module = module_of(lambda: TimeFirst(rank == size - 1), rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group),
        M,
        loss_fn=functional.mse_loss,
        args_chunk_spec=TensorChunkSpec.from_tuple((1,)),
        output_merge_spec=TensorChunkSpec(0),
    )
    losses: list[Tensor] = []
    if rank == 0:
        output = schedule.step(data(1, 3, ROWS, WIDTH))
    elif rank == size - 1:
        output = schedule.step(target=data(2, ROWS, 3, WIDTH), losses=losses)
    else:
        output = schedule.step()
    return {"losses": losses, "output": output, "gradients": gradients_of(module)}


def _merged(lib: ModuleType, rank: int, size: int, group: Any, name: str, spec: Any) -> Results:
    module = module_of(lambda: TimeFirst(False), rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group),
        M,
        args_chunk_spec=(TensorChunkSpec(1),),
        output_merge_spec=spec,
    )
    x = (data(1, 3, ROWS, WIDTH),) if rank == 0 else ()
    with torch.no_grad():
        return {"step": schedule.step(*x), "eval": schedule.eval(*x), "gradients": gradients_of(module)}


def outputs_merged_along_dimension_1(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """output_merge_spec, in a schedule without a loss."""
    return _merged(lib, rank, size, group, name, TensorChunkSpec(1))


def outputs_merged_as_a_tuple_says(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """A tuple with one spec: torch returns a tuple with one tensor."""
    return _merged(lib, rank, size, group, name, (TensorChunkSpec(1),))


def plain_sums(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """scale_grads=False, for a loss that is scaled already."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target, reduction="sum") / (ROWS * WIDTH)

    module = module_of(Layer, rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=loss, scale_grads=False
    )
    if rank == 0:
        schedule.step(data(1, ROWS, WIDTH))
    elif rank == size - 1:
        schedule.step(target=data(2, ROWS, WIDTH))
    else:
        schedule.step()
    return {"gradients": gradients_of(module)}


def no_outputs(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """return_outputs=False."""
    module = module_of(Layer, rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=functional.mse_loss
    )
    losses: list[Tensor] = []
    if rank == 0:
        output = schedule.step(data(1, ROWS, WIDTH), return_outputs=False)
    elif rank == size - 1:
        output = schedule.step(target=data(2, ROWS, WIDTH), losses=losses, return_outputs=False)
    else:
        output = schedule.step(return_outputs=False)
    return {"losses": losses, "output": output, "gradients": gradients_of(module)}


def more_arguments_of_the_loss(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """loss_kwargs."""

    def loss(output: Tensor, target: Tensor, *, power: int, factor: float = 1.0) -> Tensor:
        return (output - target).pow(power).mean() * factor

    module = module_of(Layer, rank)
    schedule = getattr(lib, name)(lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=loss)
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(data(1, ROWS, WIDTH))
    elif rank == size - 1:
        schedule.step(target=data(2, ROWS, WIDTH), losses=losses, loss_kwargs={"power": 4, "factor": 0.5})
    else:
        schedule.step()
    return {"losses": losses, "gradients": gradients_of(module)}


def tokens_and_classes(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """Integers into an embedding; cross entropy over a sequence."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(0, 1))

    module = module_of(Tokens if rank == 0 else Layer, rank)
    schedule = getattr(lib, name)(lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=loss)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(9, (ROWS, 5), generator=generator)
    target = torch.randint(WIDTH, (ROWS, 5), generator=generator)
    losses: list[Tensor] = []
    if rank == 0:
        output = schedule.step(tokens)
    elif rank == size - 1:
        output = schedule.step(target=target, losses=losses)
    else:
        output = schedule.step()
    return {"losses": losses, "output": output, "gradients": gradients_of(module)}


def evaluation(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """eval() before and after training, with losses."""
    module = module_of(Layer, rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=functional.mse_loss
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: Results = {}

    def call(method: Any, what: str) -> None:
        losses: list[Tensor] = []
        if rank == 0:
            output = method(data(1, ROWS, WIDTH))
        elif rank == size - 1:
            output = method(target=data(2, ROWS, WIDTH), losses=losses)
        else:
            output = method()
        found[f"{what}: output"] = output
        found[f"{what}: losses"] = losses

    call(schedule.eval, "before")
    found["gradients before"] = gradients_of(module)
    call(schedule.step, "step")
    optimizer.step()
    optimizer.zero_grad()
    call(schedule.eval, "after")
    found["gradients after"] = gradients_of(module)
    return found


SCRIPTS: dict[str, Callable[..., Results]] = {
    function.__name__: function
    for function in (
        training_in_torchs_form,
        one_line_for_every_rank,
        shapes_given_in_advance,
        keyword_arguments_per_stage,
        keyword_chunk_specs,
        two_tensors_across_boundaries,
        batch_along_dimension_1,
        outputs_merged_along_dimension_1,
        outputs_merged_as_a_tuple_says,
        plain_sums,
        no_outputs,
        more_arguments_of_the_loss,
        tokens_and_classes,
        evaluation,
    )
}
