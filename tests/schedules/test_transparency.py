"""A pipelined model computes what the model computes: outputs, losses, gradients, and the state after training."""

from __future__ import annotations

import pytest
import transparency
from rank_pool import RankPool

MODELS = ["mlp", "gpt", "mixed", "identities"]
OTHERS = [
    *(name for name in transparency.SINGLE if name not in ("ScheduleGPipe", "Schedule1F1B")),
    *(f"{name} v={v}" for name in transparency.LOOPED for v in (1, 2, 3)),
    *transparency.V_SHAPED,
]


def _check(ranks: RankPool, size: int, cases: list[transparency.Case]) -> None:
    found = [text for texts in ranks.run(size, transparency.compare_many, cases) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_pipelined_training_equals_unpipelined_training(ranks: RankPool, schedule: str, size: int, model: str) -> None:
    _check(ranks, size, transparency.cases(schedule, model, size))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", OTHERS)
def test_every_schedule_trains_as_the_unpipelined_model(ranks: RankPool, schedule: str, size: int) -> None:
    cases = []
    turn = OTHERS.index(schedule) + size
    numbers = sorted({1, 2, 3, size, 2 * size, 2 * size + 1})
    # M, models, and batches that M divides or not or that are as small as can be, take turns.
    for n_microbatches in numbers[turn % 2 :: 2]:
        rows = [2 * n_microbatches + 1, 2 * n_microbatches, n_microbatches][(turn + n_microbatches) % 3]
        cases.append((schedule, MODELS[(turn + n_microbatches) % 4], n_microbatches, rows, True))
    _check(ranks, size, cases)


@pytest.mark.parametrize("size", [2, 4])
def test_dualpipe_trains_both_copies_as_the_unpipelined_model(ranks: RankPool, size: int) -> None:
    cases = []
    for n_microbatches in sorted({1, 2, 3, size, 2 * size, 2 * size + 1}):
        rows = [2 * n_microbatches + 1, 2 * n_microbatches, n_microbatches][n_microbatches % 3]
        cases.append(("ScheduleDualPipe", MODELS[(size // 2 + n_microbatches) % 4], n_microbatches, rows, True))
    _check(ranks, size, [*cases, ("ScheduleDualPipe", "mlp", 5, 12, False)])


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleZBVZeroBubble"])
@pytest.mark.parametrize("size", [1, 3])
def test_without_scaling_gradients_are_plain_sums_over_microbatches(ranks: RankPool, schedule: str, size: int) -> None:
    _check(ranks, size, [(schedule, "mlp", 4, 10, False), (schedule, "gpt", 3, 9, False)])
