"""Gradients flow across stage boundaries exactly as they flow in plain PyTorch, in the cases where that is hard."""

from __future__ import annotations

import shutil

import autograd_data
import autograd_eval
import autograd_hooks
import autograd_runs
import autograd_special
import pytest
from rank_pool import RankPool

SCHEDULES = ["ScheduleGPipe", "Schedule1F1B"]


EVERYWHERE = [0, 1, 2]


def _check(
    ranks: RankPool,
    kind: str,
    name: str,
    places: list[int],
    *,
    size: int = 3,
    schedules: list[str] = SCHEDULES,
    link: str = "auto",
    count: int | None = None,
) -> None:
    arguments = (kind, name, places, schedules, link, count)
    found = [text for texts in ranks.run(size, autograd_runs.compare, *arguments) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", list(autograd_special.SPECIALS))
def test_an_unusual_stage_first_in_the_middle_or_last_gets_the_gradients_of_plain_pytorch(
    ranks: RankPool, name: str
) -> None:
    _check(ranks, "special", name, autograd_special.PLACES.get(name, EVERYWHERE))


@pytest.mark.parametrize("name", list(autograd_hooks.HOOKS))
def test_hooks_see_and_do_what_they_see_and_do_in_plain_pytorch(ranks: RankPool, name: str) -> None:
    _check(ranks, "hook", name, autograd_special.PLACES.get(name, EVERYWHERE))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("special", name) for name in autograd_special.SPECIALS] + [("hook", name) for name in autograd_hooks.HOOKS],
)
def test_between_stages_of_one_rank_gradients_are_those_of_plain_pytorch(ranks: RankPool, kind: str, name: str) -> None:
    places = autograd_special.PLACES.get(name, EVERYWHERE)
    _check(ranks, kind, name, places, size=1, schedules=["I and W"], count=3)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("special", name) for name in autograd_special.SPECIALS] + [("hook", name) for name in autograd_hooks.HOOKS],
)
def test_a_backward_in_two_halves_gets_the_gradients_of_plain_pytorch(ranks: RankPool, kind: str, name: str) -> None:
    _check(ranks, kind, name, [1], schedules=["ScheduleZBH1"])


@pytest.mark.parametrize("name", list(autograd_data.CASES))
def test_gradients_are_those_of_plain_pytorch_with(ranks: RankPool, name: str) -> None:
    _check(ranks, "case", name, [0], schedules=[*SCHEDULES, "ScheduleZBH1"])


@pytest.mark.parametrize(
    "name", ["relu in place", "returns a parameter", "returns a view of a parameter", "checkpoint", "ignores its input"]
)
def test_an_unusual_stage_alone_gets_the_gradients_of_plain_pytorch(ranks: RankPool, name: str) -> None:
    _check(ranks, "special", name, [0], size=1)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "x has a graph behind it",
        "a sparse embedding",
        "autocast",
        "a loss with a parameter in it",
        "a nested target",
    ],
)
def test_one_stage_alone_gets_the_gradients_of_plain_pytorch_with(ranks: RankPool, name: str) -> None:
    _check(ranks, "case", name, [0], size=1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("special", "relu in place"),
        ("special", "returns its input and views of it"),
        ("special", "returns a view of a parameter"),
        ("special", "returns an output that nobody uses"),
        ("special", "returns integers and flags too"),
        ("special", "returns a transposed tensor"),
        ("special", "complex and conjugate"),
        ("special", "bfloat16"),
        ("special", "float8 without a gradient"),
        ("special", "an empty tensor"),
        ("special", "a number"),
        ("case", "inputs changed in place beside one that is saved"),
        ("case", "stages that only pass on"),
        ("case", "other batch sizes"),
        ("case", "a stage that returns integers only"),
        ("case", "first stages frozen"),
    ],
)
def test_over_the_c10d_link_gradients_are_those_of_plain_pytorch_too(ranks: RankPool, kind: str, name: str) -> None:
    _check(ranks, kind, name, [1], schedules=["Schedule1F1B"], link="c10d")


def test_a_compiled_stage_gets_the_gradients_of_plain_pytorch(ranks: RankPool) -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    found = [text for texts in ranks.run(2, autograd_eval.compare_compiled, timeout=110) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("order", ["eval first", "eval between", "eval last"])
@pytest.mark.parametrize("mode", ["plain", "no_grad", "inference_mode", "module.eval()"])
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBH1"])
def test_eval_touches_nothing_whenever_it_comes(ranks: RankPool, order: str, mode: str, schedule: str) -> None:
    found = [text for texts in ranks.run(3, autograd_eval.evaluate, order, mode, schedule) for text in texts]
    assert not found, "\n".join(found)
