"""What only a GPU can show. tests/test_nccl.py runs the same on the emulator, benchmarks/gpu_check.sh all of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import self_loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


@pytest.mark.parametrize("model", ["mlp", "gpt", "mixed", "identities"])
@pytest.mark.parametrize("n_stages", [2, 3])
def test_training_over_a_communicator_of_one_rank_equals_unpipelined_training(model: str, n_stages: int) -> None:
    assert self_loop.train(torch.device("cuda"), model, n_stages, 4, 10) == []
