"""A script for torch.distributed.pipelining computes the same after its import is swapped."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import swap_runs
import swap_scripts
import torch.distributed.pipelining as theirs
from rank_pool import RankPool

import pypipe


@pytest.fixture(autouse=True)
def _fresh_ranks_after_a_failure(ranks: RankPool, request: pytest.FixtureRequest) -> Iterator[None]:
    """torch's ranks wait for one that failed until the end of time."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        ranks.close()


def _check(ranks: RankPool, size: int, script: str, *arguments: object) -> None:
    found = [text for texts in ranks.run(size, swap_runs.run_both, script, *arguments, timeout=30.0) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("script", swap_scripts.SCRIPTS)
def test_a_script_computes_what_it_computes_with_torchs_classes(
    ranks: RankPool, script: str, size: int, schedule: str
) -> None:
    _check(ranks, size, script, schedule)


def test_a_file_whose_import_is_swapped_computes_what_it_did(ranks: RankPool) -> None:
    _check(ranks, 3, "text_with_its_import_swapped")


@pytest.mark.parametrize("schedule", swap_runs.MULTI)
def test_a_script_of_several_stages_per_rank_computes_what_it_computes_with_torchs_classes(
    ranks: RankPool, schedule: str
) -> None:
    _check(ranks, 2, "several_stages", schedule)


# dw_builder and get_mesh are private to torch's own callers.
LEFT_OUT = {"dw_builder", "get_mesh"}


@pytest.mark.parametrize("name", ["PipelineStage", "ScheduleGPipe", "Schedule1F1B", *swap_runs.MULTI])
def test_constructors_take_torchs_arguments_in_torchs_order(name: str) -> None:
    expected = [p for p in inspect.signature(getattr(theirs, name)).parameters if p not in LEFT_OUT]
    assert list(inspect.signature(getattr(pypipe, name)).parameters)[: len(expected)] == expected


@pytest.mark.parametrize("method", ["step", "eval"])
def test_step_and_eval_take_torchs_arguments(method: str) -> None:
    expected = inspect.signature(getattr(theirs.Schedule1F1B, method)).parameters
    found = inspect.signature(getattr(pypipe.Schedule1F1B, method)).parameters
    assert set(expected) <= set(found)
    for name, parameter in expected.items():
        assert (parameter.kind, parameter.default) == (found[name].kind, found[name].default), name
