"""Schedule.clip_grad_norm_: one norm, that of the unpipelined model, on every rank."""

from __future__ import annotations

import math

import clipping_cases
import pytest
import transparency
from data_parallel_cases import Case
from rank_pool import RankPool

SCHEDULES = [
    *transparency.SINGLE,
    *(f"{name} v=2" for name in transparency.LOOPED),
    *transparency.V_SHAPED,
    *transparency.BIDIRECTIONAL,
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_norm_is_that_of_the_unpipelined_model(ranks: RankPool, schedule: str) -> None:
    results = ranks.run(2, clipping_cases.clip, schedule)
    assert not [text for _, found in results for text in found], results
    assert results[0][0] == results[1][0]  # the very same bits


@pytest.mark.parametrize("size", [1, 4])
def test_any_number_of_ranks(ranks: RankPool, size: int) -> None:
    results = ranks.run(size, clipping_cases.clip, "Schedule1F1B")
    assert not [text for _, found in results for text in found], results
    assert len({tuple(norms) for norms, _ in results}) == 1


def test_replicas_count_once_and_shards_count_as_one_parameter(ranks: RankPool) -> None:
    wrappers = ["ddp", "fsdp", "fsdp_nested", "bucket_view", "replicate"]
    cases = [Case("ScheduleInterleaved1F1B v=2", wrapper, 3, 5) for wrapper in wrappers]
    cases.append(Case("ScheduleZBH1", "hsdp", 3, 5, 1))
    found = [text for texts in ranks.run(4, clipping_cases.clip_replicas, cases) for text in texts]
    assert not found, "\n".join(found)


def test_tensor_parallel_stages(ranks: RankPool) -> None:
    found = [text for texts in ranks.run(4, clipping_cases.clip_tensor_parallel) for text in texts]
    assert not found, "\n".join(found)


def test_the_norm_has_the_widest_dtype_and_further_parameters_count(ranks: RankPool) -> None:
    a, b = ranks.run(2, clipping_cases.dtypes)
    assert a[0] == b[0] == "torch.float64"
    assert a[1:3] == b[1:3]
    assert math.isclose(a[1], math.sqrt(a[3] + b[3]), rel_tol=1e-6)
    assert math.isclose(a[2], math.sqrt(a[3] + b[3] + 49), rel_tol=1e-6)
    assert a[4] == b[4] == 0


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("before the first step", [["InputError", "rank 0", "step()"], ["InputError", "rank 1", "step()"]]),
        ("not finite", [["NonFiniteError", "nan"], ["NonFiniteError", "nan"]]),
        ("no norm", [["InputError", "norm_type", "math.inf"]] * 2),
        ("one rank only", [["PipelineTimeout", "rank 1", "every rank", "between steps"], []]),
        ("one rank steps on", [["Pipeline", "rank 1"], ["Pipeline", "rank 0"]]),
        ("another norm", [["MismatchError", "norm_type=1", "norm_type=2"]] * 2),
        ("a peer has closed", [["PeerLost", "rank 1", "every rank"], ["nothing"]]),
        ("sparse", [["RemoteStageError", "rank 1", "sparse=True"], ["InputError", "sparse=True"]]),
        ("an error on one rank", [["RemoteStageError", "rank 1", "clip_grad_norm_"], ["RuntimeError"]]),
    ],
)
def test_what_cannot_be_is_an_error_on_every_rank(ranks: RankPool, case: str, words: list[list[str]]) -> None:
    results = ranks.run(2, clipping_cases.wrong, case)
    for said, wanted in zip(results, words, strict=True):
        assert bool(said) == bool(wanted)
        for word in wanted:
            assert word in said[0], (case, said)
    if case in ("not finite", "no norm"):  # the schedule goes on
        assert results[0][1] == results[1][1] == "nothing"


def test_a_rank_that_is_busy_is_waited_for(ranks: RankPool) -> None:
    a, b = ranks.run(2, clipping_cases.busy)
    assert a == b
