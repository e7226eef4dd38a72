"""What state a failed step leaves things in, and ranks that were built differently."""

from __future__ import annotations

import after_failure
import pytest
from rank_pool import RankPool


@pytest.mark.parametrize(
    ("program", "culprit", "failing"),
    [
        ("gpipe", 0, "0F3"),
        ("gpipe", 2, "2B1"),
        ("1f1b", 1, "1B2"),
        ("1f1b", 0, "0B3"),
        ("zb_h1", 1, "1W1"),
        ("zb_h1", 2, "2I3"),
    ],
)
def test_grad_holds_what_the_error_says_and_parameters_are_untouched(
    ranks: RankPool, program: str, culprit: int, failing: str
) -> None:
    results = ranks.run(3, after_failure.gradients_of_a_failed_step, program, 4, culprit, failing)
    for rank, (error, _, difference, unchanged) in enumerate(results):
        kind = "ArithmeticError" if rank == culprit else "RemoteStageError"
        assert error.startswith(kind), f"rank {rank}: {error}"
        assert difference < 1e-12, f"rank {rank}"
        assert unchanged, f"rank {rank}"
    assert results[culprit][1] < 4


def test_everything_that_ranks_were_built_with_differently_is_named_in_one_message(ranks: RankPool) -> None:
    first, *others = ranks.run(3, after_failure.built_differently)
    assert others == [first, first]
    for words in (
        "version (rank 0: 0.0.2, rank 1: 0.0.1, rank 2: 0.0.2)",
        "n_microbatches (rank 0: 2, rank 1: 3, rank 2: 2)",
        "scale_grads (rank 0: True, rank 1: False, rank 2: True)",
        "check (rank 0: none, rank 1: checksum and nan, rank 2: none)",
    ):
        assert words in first, first
    assert "about program" not in first  # it follows from n_microbatches
