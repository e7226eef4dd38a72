"""What split() cannot do is one clear error on every rank, and leaves the model and the ranks as they were."""

from __future__ import annotations

import pytest
import refused_cases
from rank_pool import RankPool
from refused_models import CASES


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_cannot_be_cut_there_is_refused_on_every_rank(ranks: RankPool, case: str) -> None:
    for raised, changed, trained in ranks.run(2, refused_cases.attempt, case):
        assert raised.startswith("ConfigurationError: rank"), raised
        for word in CASES[case][2]:
            assert word in raised, (word, raised)
        assert not changed
        assert not trained
