"""The number of microbatches may change from step to step, and they may be given one by one."""

from __future__ import annotations

import microbatch_count_cases as cases
import pytest
import transparency
from rank_pool import RankPool

ALL = [*transparency.SINGLE, *transparency.LOOPED, *transparency.V_SHAPED, *transparency.BIDIRECTIONAL]


def _all(found: list[list[str]]) -> list[str]:
    return [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]


@pytest.mark.parametrize("name", ALL)
def test_every_number_of_microbatches_trains_as_the_unpipelined_model(ranks: RankPool, name: str) -> None:
    """Fewer than before, more, and as many again; more slots than the first connection had, too."""
    counts = [8, 4, 12, 8, 16] if name in transparency.BIDIRECTIONAL else [4, 2, 9, 1, 4, 12]
    assert not _all(ranks.run(2, cases.change, name, 4, counts))


@pytest.mark.parametrize("built", [2, 8])
def test_the_first_step_may_have_another_number_than_the_schedule(ranks: RankPool, built: int) -> None:
    assert not _all(ranks.run(3, cases.change, "Schedule1F1B", built, [5, 3, 7]))


@pytest.mark.parametrize("link", ["shm", "c10d"])
def test_it_may_change_over_each_link(ranks: RankPool, link: str) -> None:
    assert not _all(ranks.run(2, cases.change_over, link, "ScheduleGPipe", [3, 6, 2]))


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_microbatches_of_differing_lengths_count_by_their_rows(ranks: RankPool, name: str, scale_grads: bool) -> None:
    assert not _all(ranks.run(2, cases.split, name, scale_grads))


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("counts", [[4, 2], [2, 4], [4, 16], [16, 4], [8, 16]])
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleGPipe"])
def test_ranks_that_disagree_all_learn_both_numbers(
    ranks: RankPool, name: str, counts: list[int], trained: int
) -> None:
    for said in ranks.run(2, cases.disagree, name, counts, trained, False, timeout=25.0):
        for count in counts:
            assert f" {count}" in said, said
        assert "microbatches" in said, said
        assert "Timeout" not in said, said


def test_the_middle_one_of_three_may_disagree(ranks: RankPool) -> None:
    for said in ranks.run(3, cases.disagree, "Schedule1F1B", [4, 12, 4], 1, False, timeout=25.0):
        assert "12" in said, said
        assert " 4" in said, said


def test_ranks_that_disagree_in_eval_learn_it(ranks: RankPool) -> None:
    for said in ranks.run(2, cases.disagree, "Schedule1F1B", [4, 2], 1, True, timeout=25.0):
        assert "4" in said, said
        assert "2" in said, said
        assert "n_microbatches" in said, said


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("both", "InputError", "give the one or the other"),
        ("lengths", "InputError", "arg_mbs has 2, target_mbs has 1"),
        ("tuples", "InputError", "arg_mbs[0] is a Tensor: give a tuple of positional arguments"),
        ("empty", "InputError", "arg_mbs is empty: give 1 microbatch or more"),
        ("number", "InputError", "n_microbatches is 2, but 1 microbatches were given"),
        ("zero", "InputError", "n_microbatches is 0"),
        ("rowless", "InputError", "arg_mbs[1] has no rows"),
        ("tensor", "InputError", "arg_mbs is a Tensor: give a list with one entry for each microbatch"),
        ("rows", "InputError", "target_mbs[0] has 3 rows, but microbatch 0 of the first stage has 4"),
        ("ragged", "InputError", "microbatches of differing lengths (2 of 8 rows in microbatch 0)"),
        ("program", "ConfigurationError", "n_microbatches is 2, but the program 1f1b has 4"),
    ],
)
def test_what_cannot_work_is_an_error_on_every_rank(ranks: RankPool, case: str, kind: str, words: str) -> None:
    everyone = ranks.run(2, cases.refused, case, timeout=25.0)
    assert any(said.startswith(kind) for said in everyone), everyone
    assert all(words in said for said in everyone), everyone
