"""Cases of bad input: what is wrong with what the pipeline is built from, or differs between ranks."""

from __future__ import annotations

import torch
from bad_input_setup import (
    Setup,
    case,
    environment,
)


@case
def no_microbatches_anywhere(s: Setup) -> None:
    s.microbatches = 0


@case
def no_microbatches_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.microbatches = 0


@case
def half_a_microbatch_on_rank_0(s: Setup) -> None:
    if s.rank == 0:
        s.microbatches = 2.5


@case
def no_time_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.options["timeout"] = 0


@case
def loss_that_cannot_be_called_on_rank_2(s: Setup) -> None:
    if s.rank == 2:
        s.loss = "mse"


@case
def stage_index_out_of_range_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.index = s.stages


@case
def stage_index_out_of_range_everywhere(s: Setup) -> None:
    s.index += s.stages


@case
def negative_stage_index_on_rank_2(s: Setup) -> None:
    if s.rank == 2:
        s.index = -1


@case
def stage_index_given_twice(s: Setup) -> None:
    if s.rank == 2:
        s.index = 1


@case
def stages_on_the_wrong_ranks(s: Setup) -> None:
    s.index = s.size - 1 - s.rank


@case
def no_module_on_rank_0(s: Setup) -> None:
    if s.rank == 0:
        s.module = torch.tanh  # type: ignore[assignment]


@case
def unknown_device_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.stage_options["device"] = "abacus"


@case
def unknown_link_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.around = lambda: environment(PYPIPE_LINK="string and two cans")


@case
def num_stages_that_disagree(s: Setup) -> None:
    if s.rank == 0:
        s.stages += 1


@case
def more_stages_than_ranks(s: Setup) -> None:
    s.stages += 1


@case
def fewer_stages_than_ranks(s: Setup) -> None:
    s.stages, s.index = 1, 0


@case
def another_schedule_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.schedule = "ScheduleGPipe"


@case
def another_number_of_microbatches_on_rank_2(s: Setup) -> None:
    if s.rank == 2:
        s.microbatches = 4


@case
def loss_only_on_the_last_rank(s: Setup) -> None:
    if not s.last:
        s.loss = None


@case
def another_scale_grads_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.options["scale_grads"] = False
