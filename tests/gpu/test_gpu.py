"""What only a GPU can show. test_nccl.py runs the same on the emulator, benchmarks/gpu_check.sh all of it."""

from __future__ import annotations

import pytest
import self_loop
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


@pytest.mark.parametrize("model", ["mlp", "gpt", "mixed", "identities"])
@pytest.mark.parametrize("n_stages", [2, 3])
def test_training_over_a_communicator_of_one_rank_equals_unpipelined_training(model: str, n_stages: int) -> None:
    assert self_loop.train(torch.device("cuda"), model, n_stages, 4, 10) == []
