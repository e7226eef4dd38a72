"""pypipe.tie: parameters of several stages that are one weight."""

from __future__ import annotations

import pytest
import ties_cases
import transparency
from rank_pool import RankPool

SCHEDULES = [
    *transparency.SINGLE,
    *(f"{name} v=2" for name in transparency.LOOPED),
    *transparency.V_SHAPED,
    *transparency.BIDIRECTIONAL,
]


@pytest.mark.parametrize(("size", "n_uses"), [(2, 2), (4, 3)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_stay_the_same_bits_and_train_as_one_weight(
    ranks: RankPool, schedule: str, size: int, n_uses: int
) -> None:
    results = ranks.run(size, ties_cases.train, schedule, n_uses)
    assert not [text for _, found in results for text in found], [found for _, found in results]
    copies = [bits for bits, _ in results if bits]
    stages = {len(bits) // 10 for bits in copies}
    assert len(copies) > 1 or stages != {1}
    by_step = [{bits[index] for bits in copies for index in _of_step(bits, step)} for step in range(10)]
    assert all(len(found) == 1 for found in by_step)


def _of_step(bits: list[bytes], step: int) -> range:
    each = len(bits) // 10
    return range(step * each, (step + 1) * each)


@pytest.mark.parametrize("schedule", ["ScheduleZBVZeroBubble", "ScheduleDualPipe", "ScheduleDualPipeV"])
def test_stages_of_one_rank_may_share_the_parameter_itself(ranks: RankPool, schedule: str) -> None:
    found = [text for texts in ranks.run(2, ties_cases.shared_objects, schedule) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("wrapper", ["ddp", "bucket_view", "find_unused", "fsdp"])
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipe"])
def test_replicated_and_sharded_stages(ranks: RankPool, schedule: str, wrapper: str) -> None:
    if (schedule, wrapper) == ("ScheduleDualPipe", "fsdp"):
        return  # refused for its own reasons
    found = [text for texts in ranks.run(4, ties_cases.replicas, schedule, wrapper) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("values", ["ConfigurationError", "table of stage 0 (rank 0)", "projection of stage 1 (rank 1)", "copy"]),
        ("shape", ["ConfigurationError", "table of stage 0 (rank 0)", "shape (9, 6)", "shape (8, 6)"]),
        ("dtype", ["ConfigurationError", "torch.float32", "torch.float64"]),
        ("frozen", ["ConfigurationError", "frozen", "rank 0", "rank 1"]),
        ("one only", ["ConfigurationError", "only table of stage 0", "same key"]),
        ("copied", ["ConfigurationError", "only projection of stage 1", "deepcopy"]),
        ("replaced", ["InputError", "tied as 'table'", "assign=True"]),
        ("hook", ["InputError", "tied as 'table'", "after step()"]),
    ],
)
def test_what_is_not_one_weight_is_refused_on_every_rank(ranks: RankPool, case: str, words: list[str]) -> None:
    for said in ranks.run(2, ties_cases.refused, case):
        for word in words:
            assert word in said, said


def test_a_failure_of_a_peer_reaches_a_rank_that_adds_up(ranks: RankPool) -> None:
    (said, _), (other, restored) = ranks.run(2, ties_cases.failure)
    assert said.startswith("ValueError: a hook fails")
    assert other.startswith("RemoteStageError")
    assert restored


def test_what_cannot_be_tied_is_refused_at_once() -> None:
    said = ties_cases.bad_arguments()
    words = ["tied as 'a' already", "a tensor that was computed", "a str", "a text as the key", "lazy"]
    for text, word in zip(said, words, strict=True):
        assert word in text
