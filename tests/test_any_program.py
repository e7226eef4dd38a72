"""One executor runs whatever the verifier accepts: any placement, any order, backwards whole or split."""

from __future__ import annotations

import pytest
import transparency
from rank_pool import RankPool


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_program_that_the_verifier_accepts_trains_as_the_unpipelined_model(ranks: RankPool, size: int) -> None:
    models = ["mlp", "mixed", "identities", "gpt"]
    cases = []
    for seed in range(7):
        n_microbatches = [4, 1, 5, 2, 7, 3, 6][seed]
        name = f"random s={size + [2, 1, 3, 0][seed % 4]} seed={seed}"
        cases.append((name, models[seed % 4], n_microbatches, 2 * n_microbatches + seed % 2, True))
    found = [text for texts in ranks.run(size, transparency.compare_many, cases) for text in texts]
    assert not found, "\n".join(found)
