"""pypipe.checkpoint: what is saved at one layout goes on at any other as if it had never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_cases import alone, gone_on, refused, saved
from rank_pool import RankPool

LAYOUTS = {"1f1b": 4, "interleaved": 2, "sharded": 4, "dualpipe": 2, "whole": 1}


# Not nadam at "whole": torch's own load_state_dict() makes the float32 of its `mu_product` one of float64.
@pytest.mark.parametrize(
    ("target", "kind"),
    [(target, kind) for target in LAYOUTS for kind in ("adam", "sgd", "nadam") if (target, kind) != ("whole", "nadam")],
)
def test_a_run_goes_on_at_another_layout(ranks: RankPool, tmp_path: Path, target: str, kind: str) -> None:
    ranks.run(4, saved, "1f1b", kind, str(tmp_path))
    worst = max(ranks.run(LAYOUTS[target], gone_on, target, kind, str(tmp_path)))
    assert worst <= 1e-12


@pytest.mark.parametrize("source", ["sharded", "dualpipe", "whole"])
def test_a_run_goes_on_from_another_layout(ranks: RankPool, tmp_path: Path, source: str) -> None:
    ranks.run(LAYOUTS[source], saved, source, "adam", str(tmp_path))
    assert max(ranks.run(2, gone_on, "interleaved", "adam", str(tmp_path), 3, source != "whole")) <= 1e-12


def test_a_checkpoint_of_step_0_is_the_beginning(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, saved, "1f1b", "nadam", str(tmp_path), 0)
    assert max(ranks.run(2, gone_on, "interleaved", "nadam", str(tmp_path), 0)) <= 1e-12


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("clash", "stages 0 and 1 both have '0.weight'"),
        ("foreign", "rank 0: the optimizer holds what no stage of this rank has: parameter 0 of group 1"),
        ("missing", "rank 1, stage 1: the state misses 1 names: 'layers.1.0.weight'"),
        ("unexpected", "the state has 1 names that no stage has: 'other.weight'"),
        ("moment", "rank 0: 'state.layers.0.0.weight.exp_avg' has shape (4, 4), but (3, 3) in the state"),
        ("shape", "rank 0, stage 0: 'layers.0.0.weight' has shape (4, 4), but (3, 3)"),
    ],
)
def test_bad_input_is_an_error_on_every_rank(ranks: RankPool, case: str, text: str) -> None:
    for error in ranks.run(2, refused, case):
        assert error.startswith("ConfigurationError: ")
        assert text in error


def test_a_rank_that_asks_alone_is_told_who_does_not(ranks: RankPool) -> None:
    said = ranks.run(2, alone)[0]
    assert said.startswith("PipelineTimeout: rank 0 waited 0.5 s for rank 1 in pypipe.checkpoint: every rank"), said
    ranks.close()  # the ranks have done it a different number of times
