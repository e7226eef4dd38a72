"""pypipe.GradScaler: what torch.amp.GradScaler does with the whole model, on every rank."""

from __future__ import annotations

import pytest
import scaling_cases
import transparency
from data_parallel_cases import Case
from rank_pool import RankPool

SCHEDULES = [
    *transparency.SINGLE,
    *(f"{name} v=2" for name in transparency.LOOPED),
    *transparency.V_SHAPED,
    *transparency.BIDIRECTIONAL,
]
LOSSES = ["module", "function", "own backward"]


@pytest.mark.parametrize("turn", range(len(SCHEDULES)), ids=SCHEDULES)
def test_scales_and_parameters_are_those_of_the_unpipelined_model(ranks: RankPool, turn: int) -> None:
    loss = LOSSES[turn % 3]
    found = [
        text for texts in ranks.run(2, scaling_cases.train, SCHEDULES[turn], loss, turn % 2 == 1) for text in texts
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_any_number_of_ranks(ranks: RankPool, size: int, loss: str) -> None:
    found = [text for texts in ranks.run(size, scaling_cases.train, "Schedule1F1B", loss, False) for text in texts]
    assert not found, "\n".join(found)


def test_one_scaler_for_two_schedules(ranks: RankPool) -> None:
    found = [text for texts in ranks.run(2, scaling_cases.two_schedules) for text in texts]
    assert not found, "\n".join(found)


def test_an_overflow_in_one_shard_stops_all(ranks: RankPool) -> None:
    cases = [Case("ScheduleInterleaved1F1B v=2", wrapper, 3, 5) for wrapper in ("fsdp", "fsdp_nested", "fsdp_inside")]
    cases.append(Case("ScheduleZBH1", "hsdp", 3, 5, 1))
    found = [text for texts in ranks.run(4, scaling_cases.replicas, cases) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("scale by hand", [["PipelineError", "leave scale() out", "get_scale()"]] * 2),
        ("a second scaler", [["ConfigurationError", "has a GradScaler already"]] * 2),
        ("no schedule", [["ConfigurationError", "takes a schedule"]] * 2),
        ("other scales", [["ConfigurationError", "rank 0: scale 64", "rank 1: scale 128"]] * 2),
        ("twice", [["RuntimeError", "already been called"]] * 2),
        ("half", [["ValueError", "FP16"], ["RemoteStageError", "rank 0", "FP16"]]),
        ("another call", [["MismatchError", "GradScaler.unscale_()", "clip_grad_norm_"]] * 2),
        ("closed", [["PeerLost", "rank 1"], ["closed"]]),
    ],
)
def test_what_cannot_be_is_an_error_on_every_rank(ranks: RankPool, case: str, words: list[list[str]]) -> None:
    for said, wanted in zip(ranks.run(2, scaling_cases.wrong, case), words, strict=True):
        for word in wanted:
            assert word in said, (case, said)


def test_where_it_is_disabled_the_optimizer_steps_alone(ranks: RankPool) -> None:
    for result in ranks.run(2, scaling_cases.disabled):
        assert result == [True, 1.0, {}, 3, None]
