"""Measured steps: ranks' clocks are brought to one, and the prediction is that of the measured means."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypipe.program import Event, RankTimes, Timeline, gpipe, merge_ranks, one_f_one_b, predict, simulate


def seen_by(timeline: Timeline, hosts: list[str], ahead: dict[str, float]) -> list[RankTimes]:
    """What the ranks' own clocks would have shown."""
    return [
        RankTimes(host, [Event(a, start + ahead[host], end + ahead[host]) for a, start, end in events])
        for host, events in zip(hosts, timeline.ranks, strict=True)
    ]


def times(timeline: Timeline) -> list[list[float]]:
    return [[time for event in events for time in event[1:]] for events in timeline.ranks]


@given(
    st.sampled_from([gpipe, one_f_one_b]),
    st.integers(1, 6),
    st.lists(st.sampled_from("abc"), min_size=4, max_size=4),
    st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3),
)
def test_clocks_of_hosts_are_brought_to_one_where_messages_take_equal_times(
    builder: Any, n_microbatches: int, hosts: list[str], clocks: list[float]
) -> None:
    """Every F and B here has a message that is used at once, so the shortest delays are the hop's."""
    timeline = simulate(builder(4, n_microbatches), forward=1.0, backward=2.0, hop=0.25)
    merged = merge_ranks(timeline.program, seen_by(timeline, hosts, dict(zip("abc", clocks, strict=True))))
    for found, true in zip(times(merged), times(timeline), strict=True):
        assert found == pytest.approx(true, abs=1e-6)


def test_on_one_host_no_time_is_touched_but_the_zero() -> None:
    timeline = simulate(one_f_one_b(2, 3), forward=1.0, backward=[5.0, 1.0])
    late = seen_by(timeline, ["a", "a"], {"a": 1000.0})
    assert times(merge_ranks(timeline.program, late)) == times(timeline)


def test_messages_of_one_direction_put_the_shortest_delay_at_nothing() -> None:
    timeline = simulate(gpipe(2, 3).forward_only(), forward=1.0, hop=0.5)
    merged = merge_ranks(timeline.program, seen_by(timeline, ["a", "b"], {"a": 0.0, "b": 77.0}))
    assert times(merged) == times(simulate(gpipe(2, 3).forward_only(), forward=1.0))


def test_another_order_than_the_program_s_is_no_measurement_of_it() -> None:
    timeline = simulate(one_f_one_b(2, 3))
    with pytest.raises(ValueError, match="rank 0 ran other actions than the program gpipe lists"):
        merge_ranks(gpipe(2, 3), seen_by(timeline, ["a", "a"], {"a": 0.0}))


def test_the_prediction_is_the_simulation_with_each_stage_s_mean_times() -> None:
    timeline = simulate(one_f_one_b(3, 5), forward=[1.0, 2.0, 3.0], backward=[4.0, 5.0, 1.5], hop=0.5)
    predicted = predict(timeline)
    expected = simulate(one_f_one_b(3, 5), forward=[1.0, 2.0, 3.0], backward=[4.0, 5.0, 1.5])
    for found, true in zip(times(predicted), times(expected), strict=True):
        assert found == pytest.approx(true)
