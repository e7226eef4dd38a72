"""The bubble's parts: they add up, and each cause shows in its own part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypipe.program import Event, Timeline, build, builder_names, gpipe, one_f_one_b, simulate, split_bubble

BUILDERS = st.sampled_from([gpipe, one_f_one_b])
TIMES = st.lists(st.floats(0.1, 10), min_size=4, max_size=4)


def test_equal_stages_without_transfers_have_the_program_s_own_bubble_only() -> None:
    for program in (gpipe(4, 16), one_f_one_b(4, 16)):
        bubble = split_bubble(simulate(program, forward=1.0, backward=2.0))
        assert bubble.warm_up_and_cool_down == pytest.approx(3 / 19, abs=1e-12)
        assert (bubble.imbalance, bubble.exposed_transfer) == pytest.approx((0, 0), abs=1e-12)


def test_one_slow_stage_shows_as_imbalance() -> None:
    """P=2, GPipe, M=4, forward 1 and 3: the step is 1 + 4*3 + 4*2 + 2, and with mean times 2 + 4*2 + 4*2 + 2."""
    bubble = split_bubble(simulate(gpipe(2, 4), forward=[1.0, 3.0], backward=2.0))
    assert bubble.warm_up_and_cool_down == pytest.approx((2 * 20 - 32) / 46)
    assert bubble.imbalance == pytest.approx(2 * (23 - 20) / 46)
    assert bubble.exposed_transfer == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("n_ranks", "n_microbatches"), [(2, 4), (4, 8), (4, 16), (8, 24)])
def test_a_hop_s_exposed_latency_is_1f1b_s_known_figure(n_ranks: int, n_microbatches: int) -> None:
    """At equal times a hop of c adds c * (2 (p - 1) m / p + 2 (p - 2)) where m is a multiple of p."""
    p, m, hop = n_ranks, n_microbatches, 0.01
    timeline = simulate(one_f_one_b(p, m), forward=1.0, backward=1.0, hop=hop)
    added = hop * (2 * (p - 1) * m / p + 2 * (p - 2))
    assert split_bubble(timeline).exposed_transfer == pytest.approx(added / timeline.step_time)


@given(BUILDERS, st.integers(1, 9), TIMES, TIMES, st.floats(0, 5))
def test_the_parts_add_up_and_only_imbalance_can_be_negative(
    builder: object, n_microbatches: int, forward: list[float], backward: list[float], hop: float
) -> None:
    assert callable(builder)
    timeline = simulate(builder(4, n_microbatches), forward=forward, backward=backward, hop=hop)
    bubble = split_bubble(timeline)
    assert bubble.ratio == pytest.approx(timeline.bubble_ratio, abs=1e-9)
    assert bubble.warm_up_and_cool_down >= -1e-12
    assert bubble.exposed_transfer >= -1e-12
    if hop == 0:
        assert bubble.exposed_transfer == pytest.approx(0, abs=1e-9)


def test_a_measured_pause_counts_as_exposed_and_an_uneven_microbatch_as_imbalance() -> None:
    program = gpipe(1, 2)
    f0, f1, b1, b0 = program.ranks[0]

    def bubble(*events: Event) -> tuple[float, float, float]:
        parts = split_bubble(Timeline(program, (events,)))
        return parts.warm_up_and_cool_down, parts.imbalance, parts.exposed_transfer

    paused = bubble(Event(f0, 0, 1), Event(f1, 2, 3), Event(b1, 3, 4), Event(b0, 4, 5))
    assert paused == pytest.approx((0, 0, 0.2))
    uneven = bubble(Event(f0, 0, 1), Event(f1, 1, 4), Event(b1, 4, 5), Event(b0, 5, 6))
    assert uneven == pytest.approx((0, 0, 0))


def test_a_step_without_time_has_no_bubble() -> None:
    assert split_bubble(simulate(gpipe(2, 2), forward=0.0, backward=0.0)).ratio == 0


@pytest.mark.parametrize("name", builder_names())
def test_every_schedule_s_bubble_is_divided(name: str) -> None:
    program = build(name, 4, 8)
    costs = [1.0 + 0.1 * stage for stage in range(program.n_stages)]
    timeline = simulate(program, forward=costs, input_backward=costs, weight_backward=costs, hop=0.05)
    bubble = split_bubble(timeline)
    assert bubble.ratio == pytest.approx(timeline.bubble_ratio, abs=1e-12)
    assert bubble.exposed_transfer > 0
    even = split_bubble(simulate(program, forward=1.0, input_backward=1.0, weight_backward=1.0))
    assert (even.imbalance, even.exposed_transfer) == pytest.approx((0, 0), abs=1e-12)
