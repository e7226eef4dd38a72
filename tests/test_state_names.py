"""Stages with `state_dict` keys in common: torch.distributed.checkpoint would keep one tensor of each name."""

from __future__ import annotations

import pytest
from rank_pool import RankPool
from state_names_cases import warned


@pytest.mark.parametrize(
    ("schedule", "kind", "key"),
    [
        ("Schedule1F1B", "alike", "'0.weight'"),
        ("Schedule1F1B", "large", "'p"),
        ("Schedule1F1B", "one", "'shared'"),
        ("ScheduleZBVZeroBubble", "alike", "'0.weight'"),
    ],
)
def test_a_clash_is_warned_of_once(ranks: RankPool, schedule: str, kind: str, key: str) -> None:
    for first, second in ranks.run(2, warned, schedule, kind, [True, True]):
        assert second == []
        ((text, file),) = first
        assert text.startswith("stages 0 and 1 both have " + key)
        assert 'f"stages.{stage_index}."' in text
        assert file.endswith("state_names_cases.py")  # the line that called step()


def test_stages_of_one_rank_clash_too(ranks: RankPool) -> None:
    (((text, _),),) = ranks.run(1, warned, "ScheduleInterleaved1F1B v=2", "one", [True])[0]
    assert text.startswith("stages 0 and 1 both have 'shared'")


@pytest.mark.parametrize("kind", ["none", "renamed"])
def test_stages_with_names_of_their_own_are_not_warned_of(ranks: RankPool, kind: str) -> None:
    assert ranks.run(2, warned, "Schedule1F1B", kind, [True]) == [[[]], [[]]]


def test_two_copies_of_a_stage_do_not_clash(ranks: RankPool) -> None:
    assert ranks.run(2, warned, "ScheduleDualPipe", "none", [True]) == [[[]], [[]]]


def test_a_script_without_checkpoints_is_not_warned_until_it_imports_them(ranks: RankPool) -> None:
    for first, second, third in ranks.run(2, warned, "Schedule1F1B", "alike", [False, True, True]):
        assert (first, len(second), third) == ([], 1, [])
