"""DualPipe's two copies of a model are one model: one gradient, one optimizer's state, one batch."""

from __future__ import annotations

import model_copies_cases
import pytest
from rank_pool import RankPool


@pytest.mark.parametrize(("size", "n_microbatches"), [(2, 1), (2, 4), (4, 5)])
@pytest.mark.parametrize("name", ["plain", "tied", "odd", "sparse", "loss"])
def test_both_copies_get_the_gradient_of_the_whole_batch(
    ranks: RankPool, name: str, size: int, n_microbatches: int
) -> None:
    found = [text for texts in ranks.run(size, model_copies_cases.train, name, n_microbatches) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other values", ["two copies of stage 0", "ranks 0 and 1", "state_dict"]),
        ("one copy frozen", ["two copies of stage 0", "ranks 0 and 1", "frozen"]),
        ("other batch", ["6", "8", "same", "batch"]),
        ("x", ["args[0] (shape (8, 6))", "requires a gradient", "ScheduleDualPipeV"]),
        ("target", ["target (shape (8, 6))", "requires a gradient", "ScheduleDualPipeV"]),
        ("loss_kwargs", ["loss_kwargs['scale'] (shape (6,))", "requires a gradient", "ScheduleDualPipeV"]),
        ("closure", ["shape (6,)", "requires a gradient", "nn.Module"]),
        ("other loss", ["two copies of stage 1", "state_dict"]),
        ("lazy", ["a lazy module (weight)", "ScheduleDualPipeV"]),
        ("input on the first rank only", ["rank 1", "both ends", "step(x, target=y)"]),
        ("target on the last rank only", ["rank 0", "both ends", "target="]),
        ("optimizer in the backward", ["hook", "after step()"]),
    ],
)
def test_copies_that_are_none_are_refused_on_every_rank(ranks: RankPool, case: str, words: list[str]) -> None:
    for raised in ranks.run(2, model_copies_cases.refused, case):
        assert raised.startswith(("ConfigurationError", "InputError", "RemoteStageError")), raised
        for word in words:
            assert word in raised, raised
