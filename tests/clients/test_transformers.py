"""Models of Hugging Face transformers, made from configurations, train in a pipeline as they do whole."""

from __future__ import annotations

import pytest
from rank_pool import RankPool

pytest.importorskip("transformers", reason="the extra `clients` is not installed")
pytestmark = pytest.mark.clients

import transformers_cases  # noqa: E402
import transformers_models  # noqa: E402


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", transformers_models.MODELS)
def test_a_model_trains_as_it_does_whole(ranks: RankPool, name: str, size: int) -> None:
    for found in ranks.run(size, transformers_cases.train, name, "Schedule1F1B", "plain", timeout=200.0):
        assert found == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["plain", "checkpointing", "meta"])
def test_a_tied_model_whose_ends_are_on_one_rank(ranks: RankPool, how: str) -> None:
    for found in ranks.run(2, transformers_cases.train, "llama-tied", "ScheduleZBVZeroBubble", how, timeout=200.0):
        assert found == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["checkpointing", "loss"])
def test_layers_are_computed_again_and_the_model_computes_its_loss(ranks: RankPool, how: str) -> None:
    for found in ranks.run(2, transformers_cases.train, "qwen3", "Schedule1F1B", how, timeout=200.0):
        assert found == []
