"""Batches whose parts are cut in their own ways, trained with and without a pipeline.

A case makes stages, arguments and a target; every stage gets the keyword arguments, and those of the reference are for
the whole batch. Losses, gradients and outputs must be those of the model that has the whole batch at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transparency import TOLERANCE, build, count_stages, difference

import pypipe

WIDTH = 6
CLASSES = 5
LENGTH = 8


@dataclasses.dataclass
class Case:
    """What the pipeline is given, and what the whole model is.

    Attributes:
        make_stage: makes one stage's module.
        args, kwargs, target: for step().
        loss: loss_fn.
        whole_kwargs: what the unpipelined stages get, where that is something else.
        options: the schedule's.
        loss_kwargs: of the loss function.
    """

    make_stage: Callable[[], nn.Module]
    args: tuple[Any, ...]
    target: Any
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss: Callable[..., Tensor] = functional.mse_loss
    whole_kwargs: dict[str, Any] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Layer(nn.Module):
    """tanh of a linear layer."""

    def __init__(self, out: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, out, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def _flat_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.reshape(-1, WIDTH), target.reshape(-1))


def second_dimension(rows: int, count: int) -> Case:
    """[sequence, batch, width] against a target of [sequence, batch]; the sequence is a multiple of the batch long."""
    return Case(
        Layer,
        (_numbers(2 * rows, rows, WIDTH),),
        torch.randint(0, WIDTH, (2 * rows, rows)),
        loss=_flat_cross_entropy,
        options={
            "args_chunk_spec": (pypipe.TensorChunkSpec(1),),
            "target_chunk_spec": pypipe.TensorChunkSpec(1),
            "output_merge_spec": pypipe.TensorChunkSpec(1),
        },
    )


def square(rows: int, count: int) -> Case:
    """As second_dimension, with a sequence just as long as the batch: only the spec can tell."""
    case = second_dimension(rows, count)
    return dataclasses.replace(case, args=(_numbers(rows, rows, WIDTH),), target=torch.randint(0, WIDTH, (rows, rows)))


def flattened_target(rows: int, count: int) -> Case:
    """A target of batch * sequence labels, without a spec."""
    return Case(
        Layer,
        (_numbers(rows, LENGTH, WIDTH),),
        torch.randint(0, WIDTH, (rows * LENGTH,)),
        loss=_flat_cross_entropy,
    )


class MaskedAttention(nn.Module):
    """What flex_attention computes, written out: its own backward runs on accelerators only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, block_mask: Any) -> Tensor:
        y = self.linear(x)
        scores = (y @ y.mT).masked_fill(~dense_mask(block_mask, len(x)), -1e9)
        return x + scores.softmax(-1) @ y


def dense_mask(block_mask: Any, rows: int) -> Tensor:
    """[rows, queries, keys]: where both the blocks and mask_mod allow it."""
    from torch.nn.attention.flex_attention import create_mask

    blocks = block_mask.to_dense()[:, 0].bool()
    for dim, size in ((1, block_mask.BLOCK_SIZE[0]), (2, block_mask.BLOCK_SIZE[1])):
        blocks = blocks.repeat_interleave(size, dim)
    return blocks & create_mask(block_mask.mask_mod, rows, 1, LENGTH, LENGTH, device="cpu")[:, 0]


def _documents(rows: int, *, one_row: bool) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    ids = torch.randint(0, 2, (rows, LENGTH)).cumsum(1)

    def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (ids[b, q] == ids[b, k])

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    size = LENGTH // 4
    if not one_row:
        return create_block_mask(same_document, rows, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=size)
    made = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=size)
    made.mask_mod = same_document
    return made


def block_mask(rows: int, count: int) -> Case:
    """A BlockMask of a row for each of the batch's."""
    mask = _documents(rows, one_row=False)
    return Case(MaskedAttention, (_numbers(rows, LENGTH, WIDTH),), _numbers(rows, LENGTH, WIDTH), {"block_mask": mask})


def block_mask_of_one_row(rows: int, count: int) -> Case:
    """A BlockMask of one row for all, whose mask_mod looks at the batch's row all the same."""
    mask = _documents(rows, one_row=True)
    return Case(MaskedAttention, (_numbers(rows, LENGTH, WIDTH),), _numbers(rows, LENGTH, WIDTH), {"block_mask": mask})


class Pooled(nn.Module):
    """Adds the mean of a row's component, and of its product with another one of the same lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, words: Tensor, more: Tensor) -> Tensor:
        both = words * more
        means = torch.stack([w.mean(0) + b.sum(0) for w, b in zip(words.unbind(), both.unbind(), strict=True)])
        return torch.tanh(self.linear(x + means))


def _nested(rows: int, layout: torch.layout) -> Case:
    parts = [_numbers(1 + i % 3, WIDTH) for i in range(rows)]
    words = torch.nested.nested_tensor(parts, layout=layout)
    return Case(Pooled, (_numbers(rows, WIDTH),), _numbers(rows, WIDTH), {"words": words, "more": words + words})


def nested_jagged(rows: int, count: int) -> Case:
    """Two nested tensors of the jagged layout that have the same offsets."""
    return _nested(rows, torch.jagged)


def nested_strided(rows: int, count: int) -> Case:
    """Two nested tensors of the strided layout."""
    return _nested(rows, torch.strided)


class Padded(Layer):
    """Pads a nested tensor; what has been padded counts from then on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.nested.to_padded_tensor(x, 0.5) if x.is_nested else x)


def _to_each_word(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target[:, None].expand_as(output))


def nested_padded(rows: int, count: int) -> Case:
    """A jagged nested tensor that a stage pads: to the longest row of the batch, wherever that is."""
    parts = [_numbers(1 + i % 4, WIDTH) for i in range(rows)]
    words = torch.nested.nested_tensor(parts, layout=torch.jagged)
    return Case(Padded, (words,), _numbers(rows, WIDTH), loss=_to_each_word)


def nested_padded_further(rows: int, count: int) -> Case:
    """The same with a max_seqlen of its own."""
    case = nested_padded(rows, count)
    (words,) = case.args
    words = torch.nested.nested_tensor_from_jagged(words.values(), words.offsets(), min_seqlen=1, max_seqlen=9)
    return dataclasses.replace(case, args=(words,))


class Meta(NamedTuple):
    """A NamedTuple of a tensor and a number."""

    scale: Tensor
    factor: float


@dataclasses.dataclass(frozen=True)
class Extra:
    """A frozen dataclass with a container, an inner NamedTuple and a field that is no argument."""

    shift: list[Tensor]
    meta: Meta
    name: str = "extra"
    double: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "double", self.shift[0] * 2)


class Named(dict[str, Any]):
    """A dict whose items are attributes too."""

    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args, **items)
        self.__dict__ = self


class Unpacks(nn.Module):
    """Takes apart what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, extra: Extra, named: Any) -> Tensor:
        y = self.linear(x) * extra.meta.scale * extra.meta.factor + extra.shift[0] + extra.double
        return torch.tanh(y + named.bias + len(extra.name))


@dataclasses.dataclass
class Goal:
    """A target."""

    values: Tensor
    weights: Tensor


def _weighted(output: Tensor, goal: Goal) -> Tensor:
    return ((output - goal.values).square() * goal.weights).mean()


def containers(rows: int, count: int) -> Case:
    """Tensors within a frozen dataclass, a NamedTuple and a dict of its own kind; the target is a dataclass."""
    extra = Extra([_numbers(rows, WIDTH)], Meta(_numbers(rows, 1), 0.5))
    goal = Goal(_numbers(rows, WIDTH), torch.rand(rows, 1, dtype=torch.float64))
    kwargs = {"extra": extra, "named": Named(bias=_numbers(rows, 1))}
    return Case(Unpacks, (_numbers(rows, WIDTH),), goal, kwargs, loss=_weighted)


class Scaled(nn.Module):
    """Multiplies by one number for each microbatch, and adds pairs of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, scale: Tensor, pairs: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * scale + pairs.view(len(x), 2, WIDTH).sum(1))


def lengths_of_their_own(rows: int, count: int) -> Case:
    """M rows, one for each microbatch, along dimension 1, and twice the batch's rows."""
    scale, pairs = _numbers(1, count), _numbers(2 * rows, WIDTH)
    sizes = torch.tensor([len(part) for part in torch.tensor_split(torch.empty(rows), count)])
    return Case(
        Scaled,
        (_numbers(rows, WIDTH),),
        _numbers(rows, WIDTH),
        {"scale": scale, "pairs": pairs},
        whole_kwargs={"scale": scale[0].repeat_interleave(sizes)[:, None], "pairs": pairs},
        options={"kwargs_chunk_spec": {"scale": pypipe.TensorChunkSpec(1), "pairs": pypipe.TensorChunkSpec(0)}},
    )


def _weighted_rows(output: Tensor, target: Tensor, rows: Tensor, columns: Tensor, power: float) -> Tensor:
    return (rows * (columns * (output - target) ** power)).mean()


def loss_kwargs(rows: int, count: int) -> Case:
    """A weight of each row, one of each column, and a number."""
    return Case(
        Layer,
        (_numbers(rows, WIDTH),),
        _numbers(rows, WIDTH),
        loss=_weighted_rows,
        loss_kwargs={"rows": _numbers(rows, 1), "columns": _numbers(WIDTH), "power": 2.0},
        options={"loss_kwargs_chunk_spec": {"rows": pypipe.TensorChunkSpec(0), "columns": pypipe.Replicate()}},
    )


CASES = {
    made.__name__: made
    for made in (
        second_dimension,
        square,
        flattened_target,
        block_mask,
        block_mask_of_one_row,
        nested_jagged,
        nested_strided,
        nested_padded,
        nested_padded_further,
        containers,
        lengths_of_their_own,
        loss_kwargs,
    )
}


def compare(rank: int, size: int, group: Any, schedule_name: str, cases: list[tuple[str, int, int]]) -> list[str]:
    """Two steps and an eval for each (case, rows, M); what differs, in words."""
    found = []
    for name, rows, count in cases:
        for text in _compare(rank, size, group, schedule_name, name, rows, count):
            found.append(f"rank {rank}, {schedule_name}, {name} with {rows} rows and M={count}: {text}")
    return found


def _compare(rank: int, size: int, group: Any, schedule_name: str, name: str, rows: int, count: int) -> list[str]:
    torch.manual_seed(5)
    case = CASES[name](rows, count)
    n_stages = count_stages(schedule_name, size)
    modules = [case.make_stage() for _ in range(n_stages)]
    reference = [case.make_stage() for _ in range(n_stages)]
    for module, other in zip(modules, reference, strict=True):
        other.load_state_dict(module.state_dict())
    schedule, held = build(
        rank, size, group, schedule_name, modules, count, loss_fn=case.loss, timeout=30, **case.options
    )
    has_last = any(piece == n_stages - 1 for piece, _ in held)
    differences: list[str] = []

    def check(what: str, a: Tensor | None, b: Tensor | None) -> None:
        worst = difference(a, b)
        if not worst <= TOLERANCE:
            differences.append(f"{what} differs by {worst:g}")

    def whole() -> Tensor:
        value = case.args
        for module in reference:
            value = (module(*value, **(case.kwargs if case.whole_kwargs is None else case.whole_kwargs)),)
        return value[0]

    sizes = [len(part) for part in torch.tensor_split(torch.empty(rows), count)]
    share = torch.tensor(sizes, dtype=torch.float64) / rows
    for step in range(2):  # gradients add up
        losses: list[Tensor] = []
        output = schedule.step(
            *case.args, target=case.target, losses=losses, loss_kwargs=case.loss_kwargs, **case.kwargs
        )
        expected = whole()
        loss = case.loss(expected, case.target, **case.loss_kwargs)
        loss.backward()
        if has_last:
            check(f"the output of step {step}", output, expected.detach())
            check(f"the loss of step {step}", (torch.stack(losses) * share).sum(), loss.detach())
        for piece, module in held:
            for (parameter, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
                check(f"the gradient of {piece}.{parameter} in step {step}", a.grad, b.grad)
    evaluated = schedule.eval(*case.args, **case.kwargs)
    if has_last:
        check("the output of eval", evaluated, whole().detach())
    schedule.close()
    return differences


def shown(rank: int, size: int, group: Any) -> list[str]:
    """repr() of a schedule before its first step and after it."""
    stage = pypipe.PipelineStage(Unpacks(), rank, size, torch.device("cpu"), group=group)
    case = containers(3, 2)
    spec = {"named": {"bias": pypipe.TensorChunkSpec(0)}}
    with pypipe.Schedule1F1B(stage, 2, _weighted, kwargs_chunk_spec=spec, timeout=30) as schedule:
        texts = [repr(schedule)]
        schedule.step(*case.args, target=case.target, **case.kwargs)
        return [*texts, repr(schedule)]


class TakesOffsets(nn.Module):
    """Its second positional argument is called as offsets are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return self.linear(x)


def positional_offsets(rank: int, size: int, group: Any) -> str:
    """What a step says to offsets that are given by position, as many as there are rows."""
    stage = pypipe.PipelineStage(TakesOffsets(), rank, size, torch.device("cpu"), group=group)
    schedule = pypipe.ScheduleGPipe(stage, 2, functional.mse_loss, timeout=30)
    x = _numbers(4, WIDTH)
    try:
        schedule.step(x, torch.arange(4), target=x)
    except pypipe.InputError as error:
        return str(error)
    finally:
        schedule.close()
    return "no error"
