"""Scripts for torch.distributed.pipelining that take the module they import from; what they compute is returned.

Only what torch computes correctly is asked of them: M >= P, batches that M divides, one step() per zero_grad().
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed.pipelining
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional

import pypipe

CPU = torch.device("cpu")
ROWS, WIDTH, M = 8, 6, 4
Results = dict[str, Any]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Scaled(Layer):
    """Takes a keyword argument of its own."""

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


class Pair(nn.Module):
    """Takes and returns two tensors."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.a, self.b, self.last = Layer(), Layer(), last

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x, y = self.a(x) + y, self.b(y)
        return x * y if self.last else (x, y)


class TimeFirst(nn.Module):
    """Works on (time, batch, width); the last stage returns (batch, time, width)."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.layer, self.last = Layer(), last

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).cumsum(0)
        return x.transpose(0, 1).contiguous() if self.last else x


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, WIDTH), Layer()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.embedding(tokens))


def _data(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _module(make: Callable[[], nn.Module], rank: int) -> nn.Module:
    torch.manual_seed(100 + rank)
    return make().double()


def _gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def training_in_torchs_form(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """x on the first rank, target and losses on the last, nothing in between; three optimizer steps."""
    module = _module(Layer, rank)
    stage = lib.PipelineStage(module, rank, size, CPU, group=group)
    schedule = getattr(lib, name)(stage, M, loss_fn=functional.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    found: Results = {}
    for number in range(3):
        optimizer.zero_grad()
        losses: list[Tensor] = [torch.tensor(9.0)]  # what was in the list before is dropped
        if stage.is_first:
            output = schedule.step(_data(number, ROWS, WIDTH))
        elif stage.is_last:
            output = schedule.step(target=_data(10 + number, ROWS, WIDTH), losses=losses)
            found[f"losses {number}"] = torch.stack(losses)
        else:
            output = schedule.step()
        found[f"output {number}"] = output
        found[f"gradients {number}"] = _gradients(module)
        optimizer.step()
    found["state"] = list(module.state_dict().values())
    return found


def one_line_for_every_rank(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """The same training; pypipe also takes the same line on every rank."""
    if lib is not pypipe:
        return training_in_torchs_form(lib, rank, size, group, name)
    module = _module(Layer, rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group), n_microbatches=M, loss_fn=functional.mse_loss
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    found: Results = {}
    for number in range(3):
        losses: list[Tensor] = []
        output = schedule.step(_data(number, ROWS, WIDTH), target=_data(10 + number, ROWS, WIDTH), losses=losses)
        if losses:
            found[f"losses {number}"] = torch.stack(losses)
        found[f"output {number}"] = output
        found[f"gradients {number}"] = _gradients(module)
        optimizer.step()
        optimizer.zero_grad()
    found["state"] = list(module.state_dict().values())
    return found


def shapes_given_in_advance(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """input_args and output_args, as scripts give them to spare torch its shape inference."""
    module = _module(Layer, rank)
    example = torch.zeros(ROWS // M, WIDTH, dtype=torch.float64, requires_grad=rank > 0)
    stage = lib.PipelineStage(
        module, rank, size, CPU, input_args=(example,), output_args=(module(example),), group=group
    )
    schedule = getattr(lib, name)(stage, M, functional.mse_loss)
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(_data(1, ROWS, WIDTH))
    elif rank == size - 1:
        schedule.step(target=_data(2, ROWS, WIDTH), losses=losses)
    else:
        schedule.step()
    return {"losses": losses, "gradients": _gradients(module)}


def keyword_arguments_per_stage(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """Each stage takes the keyword arguments that its own rank passes."""
    module = _module(Scaled, rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=functional.mse_loss
    )
    scale = _data(20 + rank, ROWS, 1)
    losses: list[Tensor] = []
    if rank == 0:
        output = schedule.step(_data(1, ROWS, WIDTH), scale=scale)
    elif rank == size - 1:
        output = schedule.step(target=_data(2, ROWS, WIDTH), losses=losses, scale=scale)
    else:
        output = schedule.step(scale=scale)
    return {"losses": losses, "output": output, "gradients": _gradients(module)}


def keyword_chunk_specs(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """Keyword arguments that are cut along another dimension."""

    class Transposed(Scaled):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return super().forward(x, scale=scale.t())

    module = _module(Transposed, rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group),
        M,
        loss_fn=functional.mse_loss,
        kwargs_chunk_spec={"scale": TensorChunkSpec(1)},
    )
    scale = _data(20 + rank, WIDTH, ROWS)
    if rank == 0:
        output = schedule.step(_data(1, ROWS, WIDTH), scale=scale)
    elif rank == size - 1:
        output = schedule.step(target=_data(2, ROWS, WIDTH), scale=scale)
    else:
        output = schedule.step(scale=scale)
    return {"output": output, "gradients": _gradients(module)}


def two_tensors_across_boundaries(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """Stages that take and return two tensors."""
    module = _module(lambda: Pair(rank == size - 1), rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=functional.mse_loss
    )
    losses: list[Tensor] = []
    if rank == 0:
        output = schedule.step(_data(1, ROWS, WIDTH), _data(2, ROWS, WIDTH))
    elif rank == size - 1:
        output = schedule.step(target=_data(3, ROWS, WIDTH), losses=losses)
    else:
        output = schedule.step()
    return {"losses": losses, "output": output, "gradients": _gradients(module)}


def batch_along_dimension_1(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """args_chunk_spec with torch's own TensorChunkSpec."""
    module = _module(lambda: TimeFirst(rank == size - 1), rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group),
        M,
        loss_fn=functional.mse_loss,
        args_chunk_spec=TensorChunkSpec.from_tuple((1,)),
        output_merge_spec=TensorChunkSpec(0),
    )
    losses: list[Tensor] = []
    if rank == 0:
        output = schedule.step(_data(1, 3, ROWS, WIDTH))
    elif rank == size - 1:
        output = schedule.step(target=_data(2, ROWS, 3, WIDTH), losses=losses)
    else:
        output = schedule.step()
    return {"losses": losses, "output": output, "gradients": _gradients(module)}


def _merged(lib: ModuleType, rank: int, size: int, group: Any, name: str, spec: Any) -> Results:
    module = _module(lambda: TimeFirst(False), rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group),
        M,
        args_chunk_spec=(TensorChunkSpec(1),),
        output_merge_spec=spec,
    )
    x = (_data(1, 3, ROWS, WIDTH),) if rank == 0 else ()
    with torch.no_grad():
        return {"step": schedule.step(*x), "eval": schedule.eval(*x), "gradients": _gradients(module)}


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

    module = _module(Layer, rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=loss, scale_grads=False
    )
    if rank == 0:
        schedule.step(_data(1, ROWS, WIDTH))
    elif rank == size - 1:
        schedule.step(target=_data(2, ROWS, WIDTH))
    else:
        schedule.step()
    return {"gradients": _gradients(module)}


def no_outputs(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """return_outputs=False."""
    module = _module(Layer, rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=functional.mse_loss
    )
    losses: list[Tensor] = []
    if rank == 0:
        output = schedule.step(_data(1, ROWS, WIDTH), return_outputs=False)
    elif rank == size - 1:
        output = schedule.step(target=_data(2, ROWS, WIDTH), losses=losses, return_outputs=False)
    else:
        output = schedule.step(return_outputs=False)
    return {"losses": losses, "output": output, "gradients": _gradients(module)}


def more_arguments_of_the_loss(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """loss_kwargs."""

    def loss(output: Tensor, target: Tensor, *, power: int, factor: float = 1.0) -> Tensor:
        return (output - target).pow(power).mean() * factor

    module = _module(Layer, rank)
    schedule = getattr(lib, name)(lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=loss)
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(_data(1, ROWS, WIDTH))
    elif rank == size - 1:
        schedule.step(target=_data(2, ROWS, WIDTH), losses=losses, loss_kwargs={"power": 4, "factor": 0.5})
    else:
        schedule.step()
    return {"losses": losses, "gradients": _gradients(module)}


def tokens_and_classes(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """Integers into an embedding; cross entropy over a sequence."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(0, 1))

    module = _module(Tokens if rank == 0 else Layer, rank)
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
    return {"losses": losses, "output": output, "gradients": _gradients(module)}


def evaluation(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """eval() before and after training, with losses."""
    module = _module(Layer, rank)
    schedule = getattr(lib, name)(
        lib.PipelineStage(module, rank, size, CPU, group=group), M, loss_fn=functional.mse_loss
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: Results = {}

    def call(method: Any, what: str) -> None:
        losses: list[Tensor] = []
        if rank == 0:
            output = method(_data(1, ROWS, WIDTH))
        elif rank == size - 1:
            output = method(target=_data(2, ROWS, WIDTH), losses=losses)
        else:
            output = method()
        found[f"{what}: output"] = output
        found[f"{what}: losses"] = losses

    call(schedule.eval, "before")
    found["gradients before"] = _gradients(module)
    call(schedule.step, "step")
    optimizer.step()
    optimizer.zero_grad()
    call(schedule.eval, "after")
    found["gradients after"] = _gradients(module)
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

# The script of torch's own tutorial, in the form in which people have it in their files.
TEXT = """
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

def train(rank, world_size, group, module, x, y):
    device = torch.device("cpu")
    stage = PipelineStage(module, rank, world_size, device, group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=torch.nn.MSELoss())
    losses = []
    if rank == 0:
        schedule.step(x)
    elif rank == world_size - 1:
        output = schedule.step(target=y, losses=losses)
        losses.append(output)
    else:
        schedule.step()
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.MSELoss(), scale_grads=False)
    if rank == 0:
        schedule.step(x)
    elif rank == world_size - 1:
        output = schedule.step(target=y, losses=losses)
        losses.append(output)
    else:
        schedule.step()
    return losses
"""


def text_with_its_import_swapped(lib: ModuleType, rank: int, size: int, group: Any) -> Results:
    """The text, with nothing but the module's name replaced."""
    space: dict[str, Any] = {}
    exec(TEXT.replace("torch.distributed.pipelining", lib.__name__), space)
    module = _module(Layer, rank)
    losses = space["train"](rank, size, group, module, _data(1, ROWS, WIDTH), _data(2, ROWS, WIDTH))
    return {"losses": losses, "gradients": _gradients(module)}


MULTI = [
    *("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"),
    *("ScheduleZBVZeroBubble", "ScheduleDualPipeV"),
]


def several_stages(lib: ModuleType, rank: int, size: int, group: Any, name: str) -> Results:
    """Two stages on each rank; a keyword argument goes to both of a rank's."""
    is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    pieces = [rank, 2 * size - 1 - rank if is_v else rank + size]
    modules = [_module(Scaled, piece) for piece in pieces]
    stages = [
        lib.PipelineStage(module, piece, 2 * size, CPU, group=group)
        for module, piece in zip(modules, pieces, strict=True)
    ]
    schedule = getattr(lib, name)(stages, M, loss_fn=functional.mse_loss, scale_grads=True)
    optimizer = torch.optim.Adam([p for module in modules for p in module.parameters()], lr=0.01)
    found: Results = {}
    for number in range(2):
        losses: list[Tensor] = []
        args = (_data(number, ROWS, WIDTH),) if any(stage.is_first for stage in stages) else ()
        has_last = any(stage.is_last for stage in stages)
        more = {"target": _data(10 + number, ROWS, WIDTH), "losses": losses} if has_last else {}
        output = schedule.step(*args, **more, scale=_data(20 + rank, ROWS, WIDTH))
        found[f"output {number}"] = output if has_last else None
        found[f"losses {number}"] = torch.stack(losses) if has_last else None
        found[f"gradients {number}"] = [_gradients(module) for module in modules]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {', '.join(map(_shape, value)) or 'nothing'}"
    return repr(value)


def _compare(path: str, mine: Any, theirs: Any, found: list[str]) -> None:
    if isinstance(theirs, Tensor) and isinstance(mine, Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            found.append(f"{path}: {tuple(mine.shape)} {mine.dtype} instead of {tuple(theirs.shape)} {theirs.dtype}")
            return
        worst = float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-300)) if mine.numel() else 0.0
        if not worst <= 1e-12:
            found.append(f"{path} differs by {worst:g}")
    elif isinstance(theirs, (list, tuple)) and isinstance(mine, (list, tuple)) and len(mine) == len(theirs):
        for i, pair in enumerate(zip(mine, theirs, strict=True)):
            _compare(f"{path}[{i}]", *pair, found)
    elif mine is not None or theirs is not None:
        found.append(f"{path}: {_shape(mine)} instead of {_shape(theirs)}")


def run_both(rank: int, size: int, group: Any, script: str, *arguments: Any) -> list[str]:
    """Runs a script with torch's classes and with pypipe's, and says what differs."""
    function = SCRIPTS.get(script) or globals()[script]
    theirs = function(torch.distributed.pipelining, rank, size, group, *arguments)
    mine = function(pypipe, rank, size, group, *arguments)
    found: list[str] = []
    if mine.keys() != theirs.keys():
        found.append(f"{sorted(mine)} instead of {sorted(theirs)}")
    for key in theirs:
        _compare(f"rank {rank}: {key}", mine.get(key), theirs[key], found)
    if rank == size - 1 and "losses" in theirs and script != "no_outputs" and not theirs["losses"]:
        found.append("the script computed nothing")
    return found
