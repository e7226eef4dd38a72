"""Whatever carries a batch is cut with it: a pipeline's numbers are those of the model that has the whole batch."""

from __future__ import annotations

import inspect

import cutting_cases
import pytest
import torch.distributed.pipelining as peer
import transparency
from rank_pool import RankPool

import pypipe

SCHEDULES = [
    *transparency.SINGLE,
    *(f"{name} v=2" for name in transparency.LOOPED),
    *transparency.V_SHAPED,
    *transparency.BIDIRECTIONAL,
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_kind_of_value_is_cut_with_the_batch(ranks: RankPool, schedule: str) -> None:
    # Rows that M divides, and rows that it does not.
    cases = [(name, rows, count) for name in cutting_cases.CASES for rows, count in ((4, 2), (7, 3))]
    found = [text for texts in ranks.run(2, cutting_cases.compare, schedule, cases) for text in texts]
    assert not found, "\n".join(found)


def test_the_targets_spec_stands_behind_what_torchs_classes_take_by_position() -> None:
    names = [name for name in pypipe.__all__ if name.startswith("Schedule")]
    assert len(names) == 14
    for name in names:
        parameters = inspect.signature(getattr(pypipe, name)).parameters
        assert parameters["target_chunk_spec"].kind is inspect.Parameter.KEYWORD_ONLY, name
        theirs = getattr(peer, name, None)
        if theirs is not None:
            mine = [each.name for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
            expected = list(inspect.signature(theirs).parameters)  # an older torch takes fewer
            assert mine[: len(expected)] == expected, name


def test_a_schedule_shows_its_chunk_specs_and_along_which_dimension_it_cut(ranks: RankPool) -> None:
    ((before, after),) = ranks.run(1, cutting_cases.shown)
    specs = "kwargs_chunk_spec={'named': {'bias': TensorChunkSpec(0)}}"
    assert before == f"Schedule1F1B(rank 0, stage 0, n_microbatches=2, {specs})"
    assert after.startswith(before + ", which cut args[0] (shape (3, 6)) along dimension 0, ")
    for part in (
        "kwargs['extra'].meta.scale (shape (3, 1))",
        "kwargs['named']['bias']",
        "target.values (shape (3, 6))",
    ):
        assert f"{part}" in after, after


def test_offsets_that_are_given_by_position_are_known_by_the_first_stages_name_for_them(ranks: RankPool) -> None:
    (text,) = ranks.run(1, cutting_cases.positional_offsets)
    assert "args[1] has 4 numbers" in text
    assert "cumulative offsets" in text
