"""pypipe.add_loss and pypipe.microbatch: what a stage's forward adds and asks."""

from __future__ import annotations

import inside_stage_cases as cases
import pytest
import torch
import transparency
from rank_pool import RankPool
from torch import nn

import pypipe

ALL = [*transparency.SINGLE, *transparency.LOOPED, *transparency.V_SHAPED, *transparency.BIDIRECTIONAL]


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("recomputed", ["", "saved", "reentrant"])
@pytest.mark.parametrize("name", ALL)
def test_an_auxiliary_loss_counts_as_in_the_unpipelined_model(
    ranks: RankPool, name: str, recomputed: str, scale_grads: bool
) -> None:
    if recomputed == "reentrant" and name in transparency.BIDIRECTIONAL:
        return  # its batch may not require gradients
    found = ranks.run(2, cases.train, name, recomputed, scale_grads)
    assert not any(found), found


def test_without_a_pipeline_the_weight_is_one() -> None:
    linear = nn.Linear(2, 2)
    x = torch.ones(3, 2)
    (pypipe.add_loss(linear(x), linear.weight.square().sum()).sum()).backward()
    expected = torch.full((2, 2), 3.0) + 2 * linear.weight
    assert torch.allclose(linear.weight.grad, expected)  # type: ignore[arg-type]
    with torch.no_grad():
        assert pypipe.add_loss(x, linear.weight.square().sum()) is x


def test_a_loss_of_several_elements_is_refused() -> None:
    with pytest.raises(pypipe.InputError, match=r"one element, not of shape \(2,\)"):
        pypipe.add_loss(torch.ones(2), torch.ones(2))
