"""The NCCL link, on an emulated CUDA driver and NCCL: the same code that runs on GPUs, under seeded delays.

Each seed takes the next of the cases of test_transparency.py. PYPIPE_NCCL_SEEDS sets how many seeds each schedule runs
with on each number of ranks; the default is one for each case, nearly 500 in all.
"""

from __future__ import annotations

import math
import os
import re

import autograd_runs
import nccl_bugs
import nccl_cases
import pytest
import transparency
from models import MODELS
from rank_pool import RankPool

SCHEDULES = ["ScheduleGPipe", "Schedule1F1B"]
SEEDS = int(os.environ.get("PYPIPE_NCCL_SEEDS", "0"))
LIMIT = 540 + 5 * SEEDS  # seconds
pytestmark = pytest.mark.timeout(LIMIT + 60)  # the first test builds the emulator, on a machine that may be busy

OTHERS = [
    *((3, name) for name in ("ScheduleZBH1", "ScheduleZBH2")),
    *((2, f"{name} v=2") for name in transparency.LOOPED),
    *((3, name) for name in transparency.V_SHAPED),
    *((4, name) for name in transparency.BIDIRECTIONAL),
    *((3, f"random s=6 seed={seed}") for seed in range(2)),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_training_over_nccl_equals_unpipelined_training_whatever_the_delays(
    gpus: RankPool, size: int, schedule: str
) -> None:
    every = [case for model in MODELS for case in transparency.cases(schedule, model, size)]
    every += [(schedule, "mlp", 4, 10, False), (schedule, "gpt", 3, 9, False)]
    # The stride has no factor in common with the number of cases, so all have their turn.
    stride = next(step for step in (7, 11, 13) if math.gcd(step, len(every)) == 1)
    # One rank alone sends nothing, so there more seeds than cases show nothing.
    count = SEEDS if SEEDS and size > 1 else min(SEEDS or len(every), len(every))
    cases = [(seed, every[seed * stride % len(every)]) for seed in range(count)]
    found = [text for texts in gpus.run(size, nccl_cases.seeds, cases, timeout=float(LIMIT)) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("size", "schedule"), OTHERS)
def test_every_schedule_trains_over_nccl(gpus: RankPool, size: int, schedule: str) -> None:
    shapes = [("mlp", size + 1, 2 * size + 3), ("mixed", 2 * size, 4 * size), ("identities", 3, 7)]
    cases = [(seed, (schedule, *shapes[seed % len(shapes)], True)) for seed in range(3)]
    found = [text for texts in gpus.run(size, nccl_cases.seeds, cases, timeout=500.0) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("case", "autocast"),
        ("case", "autocast with checkpoints"),
        ("case", "other batch sizes"),
        ("special", "relu in place"),
        ("special", "returns its input and views of it"),
        ("special", "returns a transposed tensor"),
        ("special", "bfloat16"),
        ("special", "an empty tensor"),
    ],
)
def test_over_nccl_gradients_are_those_of_plain_pytorch_in_hard_cases_too(gpus: RankPool, kind: str, name: str) -> None:
    arguments = (kind, name, [1], ["Schedule1F1B", "ScheduleZBH1"], "nccl")
    found = [text for texts in gpus.run(3, autograd_runs.compare, *arguments) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("communicators", ["link", "pair"])
@pytest.mark.parametrize(("size", "schedule"), OTHERS)
def test_every_schedule_trains_on_a_device_with_one_place_for_each_communicator(
    gpus: RankPool, size: int, schedule: str, communicators: str
) -> None:
    case = (0, (schedule, "mlp", size + 1, 2 * size + 3, True))
    every = gpus.run(size, nccl_cases.few_places, communicators, [case], timeout=120.0)
    found = [text for texts in every for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("size", [2, 4])
def test_layouts_may_change_from_step_to_step(gpus: RankPool, size: int) -> None:
    for seed in range(4):
        found = [text for texts in gpus.run(size, nccl_cases.changing_layouts, seed) for text in texts]
        assert not found, f"seed {seed}: " + "\n".join(found)


@pytest.mark.parametrize("model", MODELS)
def test_a_communicator_of_one_rank_carries_all_messages_of_a_process(gpus: RankPool, model: str) -> None:
    for n_stages in (2, 3):
        assert gpus.run(1, nccl_cases.to_itself, model, n_stages) == [[]]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("bug", nccl_bugs.BUGS)
def test_an_event_too_few_is_seen_under_every_seed(gpus: RankPool, bug: str, schedule: str) -> None:
    by_rank = gpus.run(2, nccl_bugs.reports, bug, schedule, list(range(4)))
    for seed, found in enumerate(zip(*by_rank, strict=True)):
        said = "\n".join(text for texts in found for text in texts)
        assert bool(said) == (bug != "none"), f"seed {seed}: {said or 'nothing was reported'}"


@pytest.mark.parametrize("communicators", ["link", "pair"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 4])
def test_a_device_with_one_place_for_each_communicator_suffices(
    gpus: RankPool, size: int, schedule: str, communicators: str
) -> None:
    models = [("mlp", size + 1, 2 * size + 3), ("mixed", 2 * size, 4 * size), ("gpt", 3, 7), ("identities", 2, 4)]
    cases = [(seed, (schedule, *model, True)) for seed, model in enumerate(models)]
    every = gpus.run(size, nccl_cases.few_places, communicators, cases, timeout=200.0)
    found = [text for texts in every for text in texts]
    assert not found, "\n".join(found)


def test_a_steady_state_step_neither_synchronizes_the_host_nor_allocates(gpus: RankPool) -> None:
    for rank, (waits, allocated, before, after) in enumerate(gpus.run(3, nccl_cases.steady_state)):
        assert waits == 0, f"rank {rank}: {waits} host synchronizations"
        assert allocated == 0, f"rank {rank}"
        for channel, counted in after.items():
            assert counted["allocations"] == before[channel]["allocations"], f"rank {rank}, {channel}"
            assert counted["messages"] > before[channel]["messages"]


def test_a_transfer_that_fails_ends_the_step_on_every_rank(gpus: RankPool) -> None:
    for rank, raised in enumerate(gpus.run(3, nccl_cases.dies, "error", timeout=60.0)):
        assert raised.startswith(("PipelineError", "RemoteStageError")), f"rank {rank}: {raised}"
        assert "rank 1" in raised, f"rank {rank}: {raised}"


def test_a_transfer_that_hangs_is_a_timeout_with_what_every_rank_is_doing(gpus: RankPool) -> None:
    for rank, raised in enumerate(gpus.run(3, nccl_cases.dies, "hang", timeout=60.0)):
        assert raised.startswith("PipelineTimeout"), f"rank {rank}: {raised}"
        assert re.search(
            r"on rank [012] a transfer of pypipe F [01]>[12] did not end within 1 s: the other end", raised
        ), raised
        rows = [line.split()[0] for line in raised.splitlines() if re.match(r"(rank|[012]) +\S", line)]
        assert rows == ["rank", "0", "1", "2"], f"rank {rank}: {raised}"


def test_nothing_past_a_tensor_is_read_where_an_empty_one_follows_it(gpus: RankPool) -> None:
    assert gpus.run(1, nccl_cases.beside_an_empty_one) == [[]]


def test_a_buffer_that_a_stage_returns_again_and_again_is_sent_before_it_is_written_again(gpus: RankPool) -> None:
    for found, said in gpus.run(2, nccl_cases.one_buffer, True):
        assert not found
        assert not said
    (found, _), _ = gpus.run(2, nccl_cases.one_buffer, False)
    assert found, "the emulator saw nothing of a buffer that is written while it is being sent"


def test_a_rank_that_runs_ahead_keeps_no_more_sent_tensors_than_there_are_slots(gpus: RankPool) -> None:
    few, many = (gpus.run(3, nccl_cases.running_ahead, n_microbatches) for n_microbatches in (8, 64))
    for rank, ((least, _), (most, found)) in enumerate(zip(few, many, strict=True)):
        assert not found
        assert max(most, least) <= 2 * 64 * 4, f"rank {rank}: {most} bytes of 64 messages, {least} of 8"
