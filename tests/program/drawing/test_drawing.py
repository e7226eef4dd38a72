"""The character picture of a program."""

import pytest

from pypipe.program import Action, Program, gpipe, grid, one_f_one_b, simulate

# The picture of GPipe with P = 4, M = 4 and unit times that the project started from.
GPIPE_4_4 = """\
t:        0   1   2   3   4   5   6   7   8   9   10  11  12  13
Stage 0:  F0  F1  F2  F3  ·   ·   ·   ·   ·   ·   B3  B2  B1  B0
Stage 1:  ·   F0  F1  F2  F3  ·   ·   ·   ·   B3  B2  B1  B0  ·
Stage 2:  ·   ·   F0  F1  F2  F3  ·   ·   B3  B2  B1  B0  ·   ·
Stage 3:  ·   ·   ·   F0  F1  F2  F3  B3  B2  B1  B0  ·   ·   ·"""


def test_gpipe_is_drawn_as_its_well_known_picture() -> None:
    assert grid(gpipe(4, 4)) == GPIPE_4_4


def test_a_timeline_with_longer_actions_fills_several_columns() -> None:
    assert grid(simulate(one_f_one_b(2, 1))).splitlines() == [
        "t:        0   1   2   3   4   5",
        "Stage 0:  F0  ·   ·   ·   B0  B0",
        "Stage 1:  ·   F0  B0  B0  ·   ·",
    ]


def test_a_rank_with_several_stages_shows_the_stage_in_each_cell() -> None:
    actions = tuple(map(Action.parse, ["0F0", "1F0", "1I0", "0I0", "1W0", "0W0"]))
    assert grid(Program("one rank", 1, (0, 0), (actions,))).splitlines() == [
        "t:        0    1    2    3    4    5",
        "Rank 0:   0F0  1F0  1I0  0I0  1W0  0W0",
    ]


def test_a_timeline_between_whole_times_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0F0 runs from 0\.0 to 0\.5: a grid shows whole times only"):
        grid(simulate(gpipe(1, 1), forward=0.5))
