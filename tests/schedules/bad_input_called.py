"""Cases of bad input: what is wrong with a call's arguments, or is raised by a stage or the loss."""

from __future__ import annotations

import types
from typing import Any

import torch
from bad_input_setup import (
    Mutters,
    Raises,
    Returns,
    Setup,
    WithFactor,
    case,
    open_file,
    raise_,
)
from torch import Tensor
from torch.nn import functional

import pypipe


@case
def batch_smaller_than_m(s: Setup) -> None:
    s.microbatches = 5


@case
def empty_batch(s: Setup) -> None:
    s.args, s.target = (s.args[0][:0],), s.target[:0]


@case
def arguments_of_differing_lengths(s: Setup) -> None:
    s.args = (s.args[0], s.args[0][:3])


@case
def kwargs_of_another_length_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.module, s.kwargs = WithFactor(), {"factor": torch.ones(3, 1, dtype=torch.float64)}


@case
def kwargs_of_another_length_on_rank_0(s: Setup) -> None:
    if s.rank == 0:
        s.module, s.kwargs = WithFactor(), {"factor": torch.ones(3, 1, dtype=torch.float64)}


@case
def target_of_another_length(s: Setup) -> None:
    if s.last:
        s.target = s.target[:3]


@case
def target_that_is_a_list_of_numbers(s: Setup) -> None:
    if s.last:
        s.target, s.loss = [0.0] * 4, lambda output, target: (output[:, 0] - target[0]).square().mean()


@case
def kwargs_with_an_array_of_rows(s: Setup) -> None:
    if s.rank == 1:
        s.module, s.kwargs = WithFactor(), {"factor": torch.ones(4, 1, dtype=torch.float64).numpy()}


@case
def output_with_a_number_of_each_microbatch(s: Setup) -> None:
    if s.last:
        s.module = Returns(lambda output: (output, float(output.detach().sum())))
        s.loss = lambda output, target: functional.mse_loss(output[0], target)


class _Unrepeatable(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)


@case
def output_that_cannot_be_made_again(s: Setup) -> None:
    if s.last:
        s.module = Returns(lambda output: _Unrepeatable(x=output))
        s.loss = lambda output, target: functional.mse_loss(output["x"], target)


class _Keeps(torch.nn.Module):
    """Computes a weight once, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6).double()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.linear.weight.tanh()
        return x @ self.kept


@case
def graph_that_microbatches_share(s: Setup) -> None:
    if s.last:
        s.module = _Keeps()


@case
def target_missing(s: Setup) -> None:
    if s.last:
        s.target = None


@case
def loss_that_is_no_scalar(s: Setup) -> None:
    s.loss = lambda output, target: (output - target).square().mean(1)


@case
def loss_that_is_complex(s: Setup) -> None:
    s.loss = lambda output, target: functional.mse_loss(output, target) * (1 + 2j)


@case
def loss_that_is_an_integer(s: Setup) -> None:
    s.loss = lambda output, target: functional.mse_loss(output, target).round().long()


@case
def loss_kwargs_as_long_as_the_batch(s: Setup) -> None:
    s.loss = lambda output, target, weight: (weight * (output - target)).square().mean()
    s.kwargs = {"loss_kwargs": {"weight": torch.ones(4, 1, dtype=torch.float64)}}


@case
def output_that_is_quantized(s: Setup) -> None:
    if s.rank == 0:
        s.module = Returns(lambda output: torch.quantize_per_tensor(output.detach().float(), 0.1, 0, torch.qint8))


@case
def loss_that_is_no_tensor(s: Setup) -> None:
    s.loss = lambda output, target: float(functional.mse_loss(output, target))


@case
def loss_that_depends_on_nothing(s: Setup) -> None:
    s.loss = lambda output, target: functional.mse_loss(output.detach(), target)


@case
def output_with_an_open_file(s: Setup) -> None:
    if s.rank == 0:
        s.module = Returns(open_file)


@case
def output_with_a_set_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.module = Returns(lambda output: {"x": output, "names": {"a"}})


@case
def output_that_is_sparse(s: Setup) -> None:
    if s.rank == 0:
        s.module = Returns(lambda output: output.detach().to_sparse())


@case
def output_on_another_device(s: Setup) -> None:
    if s.rank == 1:
        s.module = Returns(lambda output: output.to("meta"))


@case
def output_in_a_cycle(s: Setup) -> None:
    def endless(output: Tensor) -> Any:
        tree: list[Any] = [output]
        tree.append(tree)
        return tree

    if s.rank == 0:
        s.module = Returns(endless)


@case
def step_under_no_grad_everywhere(s: Setup) -> None:
    s.around = torch.no_grad


@case
def step_under_no_grad_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.around = torch.no_grad


@case
def losses_that_are_no_list(s: Setup) -> None:
    if s.last:
        s.losses = ()


@case
def losses_without_a_loss_function(s: Setup) -> None:
    s.loss, s.late = None, True
    if s.last:
        s.losses = []


@case
def args_chunk_spec_with_a_dimension_too_many(s: Setup) -> None:
    s.options["args_chunk_spec"] = (pypipe.TensorChunkSpec(2),)


@case
def args_chunk_spec_for_two_arguments(s: Setup) -> None:
    s.options["args_chunk_spec"] = (pypipe.TensorChunkSpec(0), pypipe.TensorChunkSpec(0))


@case
def output_merge_spec_that_fits_nothing(s: Setup) -> None:
    s.options["output_merge_spec"] = {"x": pypipe.TensorChunkSpec(0)}


@case
def args_chunk_spec_that_is_none(s: Setup) -> None:
    s.options["args_chunk_spec"] = ("rows",)


@case
def kwargs_chunk_spec_for_an_unknown_name(s: Setup) -> None:
    if s.rank == 1:
        s.module = WithFactor()
        s.kwargs = {"factor": torch.ones(4, 1, dtype=torch.float64)}
        s.options["kwargs_chunk_spec"] = {"fctr": pypipe.TensorChunkSpec(0)}


@case
def kwargs_that_hold_tensors_and_cannot_be_cut(s: Setup) -> None:
    if s.rank == 1:
        s.module, s.kwargs = WithFactor(), {"factor": types.SimpleNamespace(x=torch.ones(4, dtype=torch.float64))}


@case
def target_without_a_spec_where_arguments_have_one(s: Setup) -> None:
    s.options["args_chunk_spec"] = (pypipe.TensorChunkSpec(1),)
    if s.first:
        s.args = (s.args[0].T,)
        s.module.register_forward_pre_hook(lambda _, args: (args[0].T,))
    if s.last:
        s.target = torch.cat([s.target, s.target])


@case
def offsets_of_packed_sequences(s: Setup) -> None:
    if s.first:
        s.module, s.kwargs = WithFactor(), {"factor": {"cu_seqlens": torch.arange(4, dtype=torch.int32)}}


@case
def module_that_raises_in_forward(s: Setup) -> None:
    if s.rank == 1:
        s.module = Raises(ZeroDivisionError("out of luck"), at=1)


@case
def first_module_that_raises_in_forward(s: Setup) -> None:
    if s.rank == 0:
        s.module = Raises(ZeroDivisionError("out of luck"), at=0)


@case
def module_that_raises_in_backward(s: Setup) -> None:
    s.late = True
    if s.rank == 1:
        s.module = Raises(ZeroDivisionError("out of luck"), at=1, backward=True)


@case
def last_module_that_raises_in_backward(s: Setup) -> None:
    if s.last:
        s.module = Raises(ZeroDivisionError("out of luck"), at=0, backward=True)


@case
def loss_that_raises(s: Setup) -> None:
    s.loss = lambda output, target: raise_(ZeroDivisionError("out of luck"))


@case
def keyboard_interrupt_in_a_module(s: Setup) -> None:
    if s.rank == 1:
        s.module = Raises(KeyboardInterrupt(), at=1)


@case
def exit_in_a_module(s: Setup) -> None:
    if s.rank == 1:
        s.module = Raises(SystemExit(3), at=0)


@case
def error_with_a_long_text_in_another_alphabet(s: Setup) -> None:
    if s.rank == 1:
        s.module = Raises(ZeroDivisionError("\u8d85\u51fa\u8303\u56f4" * 10_000), at=1)


@case
def error_that_cannot_be_printed(s: Setup) -> None:
    if s.rank == 1:
        s.module = Raises(Mutters(), at=1)
