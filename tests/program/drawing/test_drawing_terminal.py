"""Timelines in a terminal: they keep to its width, and tell no lie in it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypipe.program import Action, Kind, Program, gpipe, grid, one_f_one_b, simulate
from pypipe.program.drawing import Panel, terminal

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("Stage", "Rank"))]


def test_the_grid_is_drawn_where_it_fits_with_its_figures_around_it() -> None:
    assert terminal(gpipe(4, 4), width=80).splitlines() == [
        "gpipe, P=4, M=4, F 1, B 1: step 14, bubble 42.9%",
        *grid(gpipe(4, 4)).splitlines(),
        "peak activations by rank: 4 4 4 4",
    ]


def test_a_grid_that_does_not_fit_loses_gaps_and_then_names_but_no_time() -> None:
    assert rows(terminal(gpipe(2, 3), width=46)) == rows(grid(gpipe(2, 3)))
    assert rows(terminal(gpipe(4, 4), width=60)) == [
        "Stage 0:  F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B3 B2 B1 B0",
        "Stage 1:  ·  F0 F1 F2 F3 ·  ·  ·  ·  B3 B2 B1 B0 ·",
        "Stage 2:  ·  ·  F0 F1 F2 F3 ·  ·  B3 B2 B1 B0 ·  ·",
        "Stage 3:  ·  ·  ·  F0 F1 F2 F3 B3 B2 B1 B0 ·  ·  ·",
    ]
    assert rows(terminal(gpipe(4, 4), width=40)) == [
        "Stage 0:  F0F1F2F3············B3B2B1B0",
        "Stage 1:  ··F0F1F2F3········B3B2B1B0··",
        "Stage 2:  ····F0F1F2F3····B3B2B1B0····",
        "Stage 3:  ······F0F1F2F3B3B2B1B0······",
    ]


def test_times_between_whole_ones_are_drawn_to_scale() -> None:
    timeline = simulate(one_f_one_b(2, 2), forward=[1.0, 1.5], backward=2.5, hop=0.25)
    assert terminal(timeline, width=60).splitlines() == [
        "1f1b, P=2, M=2, F 1.25, B 2.5: step 12, bubble 37.5%",
        "  (warm-up and cool-down 31.2%, imbalance 2.1%, exposed",
        "  transfer 4.2%)",
        "t:        0                    5                    10",
        "Stage 0:  F0──F1──···············B0────────·······B1────────",
        "Stage 1:  ·····F0────B0─────────F1────B1─────────···········",
        "peak activations by rank: 2 1",
    ]


def test_many_short_actions_are_a_texture_and_not_a_made_up_order() -> None:
    drawn = rows(terminal(one_f_one_b(2, 200), width=50))
    assert set("".join(line[10:] for line in drawn)) <= set("FB·▒")
    assert drawn[0].count("▒") > 30


def test_names_have_their_stage_where_it_cannot_run_into_another_name_and_never_half_a_number() -> None:
    actions = [Action(stage, Kind.F, microbatch) for microbatch in range(12) for stage in (0, 1)]
    actions += [Action(stage, Kind.B, microbatch) for microbatch in range(12) for stage in (1, 0)]
    timeline = simulate(Program("two", 12, (0, 0), (tuple(actions),)), forward=1.0, backward=1.0)

    def cells(columns: int) -> list[str]:
        (line,) = rows(terminal(timeline, width=10 + 48 * columns))
        return [line[10 + start : 10 + start + columns].rstrip("─ ") for start in range(0, 48 * columns, columns)]

    assert cells(5) == list(map(str, actions))  # the grid
    short = [f"{action.kind.label}{action.microbatch}" for action in actions]
    assert cells(3) == short
    assert cells(2) == [name if len(name) == 2 else name[0] for name in short]
    assert cells(1) == [name[0] for name in short]
    uneven = simulate(timeline.program, forward=1.0, backward=1.5)
    assert "0F0─" in rows(terminal(uneven, width=10 + 300))[0]


@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.floats(0.01, 1e7),
    st.floats(0, 1e7),
    st.integers(40, 200),
    st.booleans(),
)
def test_no_line_is_wider_than_the_terminal(
    n_ranks: int, n_microbatches: int, forward: float, backward: float, width: int, microseconds: bool
) -> None:
    timeline = simulate(one_f_one_b(n_ranks, n_microbatches), forward=forward, backward=backward)
    plain = terminal(Panel(timeline, in_microseconds=microseconds), width=width)
    assert max(map(len, plain.splitlines())) <= width
    coloured = terminal(Panel(timeline, in_microseconds=microseconds), width=width, colour=True)
    legend = coloured.rindex("\n\n")
    assert COLOUR.sub("", coloured[:legend]) == plain


def test_colours_differ_by_kind_and_end_where_they_began() -> None:
    coloured = terminal(gpipe(2, 2), colour=True)
    assert coloured.count("\x1b[0m") == coloured.count("\x1b[38;5;")
    painted = dict(re.findall(r"48;5;(\d+)m([FB])0\x1b", coloured))
    assert sorted(painted.values()) == ["B", "F"]


def test_several_timelines_share_one_scale() -> None:
    slow, fast = (simulate(gpipe(2, 2), forward=time, backward=time) for time in (0.9, 0.45))
    text = terminal(Panel(slow, "slow"), Panel(fast, "fast"), width=70)
    assert [line.split(",")[0] for line in text.splitlines() if "P=2" in line] == ["slow", "fast"]
    slow_row, _, fast_row, _ = rows(text)
    assert len(slow_row.rstrip("·")) - 10 == 2 * (len(fast_row.rstrip("·")) - 10)


def test_a_step_that_takes_no_time_is_drawn_too() -> None:
    assert "step 0, bubble 0%" in terminal(simulate(gpipe(2, 2), forward=0, backward=0))


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        terminal()
