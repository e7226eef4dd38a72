"""Stages that are missing, doubled or misplaced, and programs that cannot run, are one clear error on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bad_stages_cases as cases
import pytest
from rank_pool import RankPool

import pypipe


@pytest.fixture(autouse=True)
def _fresh_ranks_after_a_failure(ranks: RankPool, request: pytest.FixtureRequest) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        ranks.close()


# Case; words of the message; whether all ranks raise the very same.
CASES = [
    ("swap", ["rank 0 holds stage 1", "places stage 1 on rank 1", "rank 0: stages 0, 5; rank 1: stages 1, 4"], True),
    ("looped", ["rank 0 holds stage 3", "places stage 3 on rank 2", "rank 0: stages 0, 5"], True),
    ("twice", ["stage_index 0 is given more than once", "on ranks 0 and 1", "rank 0: stages 0, 5"], True),
    ("missing", ["rank 1 does not hold stage 4", "rank 1: stages 1, 4"], True),
    ("module", ["rank 1", "PipelineStage", "Linear"], False),
    ("too_few_pieces", ["num_stages is 3", "3 ranks", "6 stages"], True),
    ("uneven", ["num_stages is 4", "3 ranks", "multiple of 3"], True),
    ("two_for_one", ["num_stages is 6", "3 ranks", "as many ranks as there are stages"], True),
    ("other_count", ["num_stages", "rank 0: 6", "rank 2: 8", "same num_stages"], True),
    ("odd_dualpipe", ["dualpipe", "even", "3", "dualpipev"], False),
    ("unknown", ["zbw", "known are", "zbv"], False),
    ("unknown_option", ["zbv", "waves"], False),
    ("other_program", ["disagree about program", "rank 1", "same program"], True),
    ("other_number_of_microbatches", ["n_microbatches is 4", "zbv", "has 5"], False),
    ("other_number_of_ranks", ["3 ranks", "zbv", "has 2"], False),
    ("forwards_only", ["no backward", "loss_fn"], False),
    ("deadlock", ["0F0", "rank 0"], False),
    ("without_a_transfer", ["0SEND_F2", "rank 0"], False),
    ("three_chains", ["3 chains", "at most 2"], False),
    ("no_file", ["mine.csv", "cannot be read"], False),
    ("no_program", ["a int is not a program", "CSV"], False),
]


@pytest.mark.parametrize(("case", "words", "same"), CASES, ids=[row[0] for row in CASES])
def test_stages_and_programs_that_do_not_fit_are_refused_on_every_rank(
    ranks: RankPool, case: str, words: list[str], same: bool
) -> None:
    everyone = ranks.run(cases.SIZE, cases.attempt, case, timeout=30.0)
    for raised, trained in everyone:
        assert raised.startswith("ConfigurationError"), raised
        for word in words:
            assert word in raised, (word, raised)
        assert not trained, "a new schedule does not train"
    assert not same or len({raised for raised, _ in everyone}) == 1, everyone


@pytest.mark.parametrize(("stages", "what"), [([], "an empty list"), (None, "NoneType"), ("ab", "a list with a str")])
def test_a_schedule_without_stages_is_refused(stages: Any, what: str) -> None:
    for make in (pypipe.ScheduleZBVZeroBubble, pypipe.Schedule1F1B, pypipe.ScheduleAuto):
        with pytest.raises(pypipe.ConfigurationError, match=f"PipelineStage objects, not .*{what}"):
            make(stages, 4)


def test_every_case_is_looked_at() -> None:
    assert {row[0] for row in CASES} == set(cases.CASES)
