"""The simulator against closed formulas and published figures."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pypipe.program import (
    Action,
    Kind,
    Program,
    ProgramError,
    build,
    builder_names,
    gpipe,
    lower,
    one_f_one_b,
    peak_memory,
    simulate,
)

NAMES = ["gpipe", "1f1b"]
FIXED = [name for name in builder_names() if name != "auto"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_ranks", range(1, 9))
def test_the_bubble_ratio_of_equal_stages_is_the_formula(name: str, n_ranks: int) -> None:
    for n_microbatches in (*range(1, 21), 32, 64, 128):
        timeline = simulate(build(name, n_ranks, n_microbatches), forward=3, backward=5)
        assert timeline.bubble_ratio == (n_ranks - 1) / (n_microbatches + n_ranks - 1)
        assert timeline.step_time == (n_microbatches + n_ranks - 1) * 8
        assert timeline.idle == ((n_ranks - 1) * 8,) * n_ranks


@pytest.mark.parametrize(
    ("n_ranks", "n_microbatches", "ratio"),
    [
        (4, 4, Fraction(3, 7)),
        (4, 16, Fraction(3, 19)),
        (4, 64, Fraction(3, 67)),
        (8, 1, Fraction(7, 8)),
        (8, 2, Fraction(7, 9)),
        (8, 4, Fraction(7, 11)),
        (8, 8, Fraction(7, 15)),
        (8, 16, Fraction(7, 23)),
        (8, 32, Fraction(7, 39)),
        (8, 64, Fraction(7, 71)),
        (8, 128, Fraction(7, 135)),
    ],
)
def test_the_tables_of_bubble_ratios_are_reproduced(n_ranks: int, n_microbatches: int, ratio: Fraction) -> None:
    assert simulate(gpipe(n_ranks, n_microbatches)).bubble_ratio == float(ratio)


def test_gpipe_with_four_ranks_four_microbatches_and_unit_times_ends_at_14() -> None:
    timeline = simulate(gpipe(4, 4), forward=1, backward=1)
    assert timeline.step_time == 14
    assert timeline.ranks[3][3].end == timeline.ranks[3][4].start == 7


@pytest.mark.parametrize(
    ("forward", "input_backward", "weight_backward", "hop", "rate"),
    [(18522, 18086, 9337, 601, 0.2431), (29718, 29444, 19927, 527, 0.2347)],
)
def test_the_zero_bubble_papers_rate_of_1f1b_is_reproduced(
    forward: float, input_backward: float, weight_backward: float, hop: float, rate: float
) -> None:
    backward = input_backward + weight_backward
    timeline = simulate(one_f_one_b(8, 24), forward=forward, backward=backward, hop=hop)
    assert round(1 - 24 * (forward + backward) / timeline.span, 4) == rate
    assert timeline.bubble_ratio_by_span == pytest.approx(1 - 24 * (forward + backward) / timeline.span, rel=1e-12)


@pytest.mark.parametrize(("n_ranks", "n_microbatches"), [(2, 8), (4, 8), (8, 24), (8, 64)])
def test_a_hops_latency_costs_1f1b_what_the_formula_says(n_ranks: int, n_microbatches: int) -> None:
    # FACTS: c * [2(p-1)m/p + 2(p-2)] at equal times, for m a multiple of p, over the largest span.
    program = one_f_one_b(n_ranks, n_microbatches)
    without = simulate(program, forward=1000, backward=1000)
    with_hops = simulate(program, forward=1000, backward=1000, hop=1)
    cost = 2 * (n_ranks - 1) * n_microbatches / n_ranks + 2 * (n_ranks - 2)
    assert with_hops.span - without.span == cost


@pytest.mark.parametrize(("n_ranks", "n_microbatches"), [(2, 3), (4, 5), (4, 64), (8, 9), (8, 64)])
def test_a_hops_latency_costs_zb_h1_the_same_for_any_number_of_microbatches(n_ranks: int, n_microbatches: int) -> None:
    program = build("zb_h1", n_ranks, n_microbatches)
    without = simulate(program, forward=1000, input_backward=1000, weight_backward=1000)
    with_hops = simulate(program, forward=1000, input_backward=1000, weight_backward=1000, hop=1)
    assert with_hops.span - without.span == 4 * (n_ranks - 1)


def test_a_hop_delays_the_receiver_and_not_the_sender() -> None:
    timeline = simulate(gpipe(2, 2).forward_only(), forward=4, hop=10)
    assert [(start, end) for _, start, end in timeline.ranks[0]] == [(0, 4), (4, 8)]
    assert [(start, end) for _, start, end in timeline.ranks[1]] == [(14, 18), (18, 22)]


def test_hops_and_bytes_may_differ_by_boundary_and_count_in_both_directions() -> None:
    # Two boundaries: 10 + 6 / 3 and 100 + 8 / 1; the entries of the last stage are not used.
    timeline = simulate(
        gpipe(3, 1), forward=1, backward=1, hop=[10, 100, 999], message_bytes=[6, 8, 999], bandwidth=[3, 1, 1]
    )
    assert [[start for _, start, _ in events] for events in timeline.ranks] == [[0, 245], [13, 232], [122, 123]]
    assert timeline.exposed_transfer == (12, 12 + 108, 108)
    assert timeline.idle == (244, 244, 244)


def test_a_busy_link_carries_one_message_after_the_other() -> None:
    program = gpipe(2, 3).forward_only()
    free = simulate(program, forward=1, hop=5, message_bytes=40, bandwidth=10)
    busy = simulate(program, forward=1, hop=5, message_bytes=40, bandwidth=10, busy_links=True)
    assert [start for _, start, _ in free.ranks[1]] == [10, 11, 12]
    assert [start for _, start, _ in busy.ranks[1]] == [10, 14, 18]  # 4 apart: its bytes over the bandwidth
    assert busy.exposed_transfer == (0, 9 + 3 + 3)


def test_waiting_for_a_slow_neighbour_is_no_exposed_transfer() -> None:
    timeline = simulate(gpipe(2, 2), forward=[1, 5], backward=1, hop=2)
    # Rank 1 waits for its first message, and the second arrives while it computes; rank 0 waits for both its
    # gradients' making, and for one of them on its way.
    assert timeline.exposed_transfer == (2, 2)


def test_peak_memory_counts_or_weighs_what_is_alive() -> None:
    timeline = simulate(one_f_one_b(4, 8))
    assert timeline.peak_activations == (4, 3, 2, 1)
    assert timeline.peak_memory([5.0, 1, 1, 7]) == (20, 3, 2, 7)
    actions = tuple(map(Action.parse, ["0F0", "1F0", "1I0", "0I0", "1W0", "0F1", "0W0", "1F1", "1B1", "0B1"]))
    program = Program("one rank", 2, (0, 0), (actions,))
    assert peak_memory(program) == (2,)
    assert peak_memory(program, [3, 10]) == (13,)
    assert peak_memory(program.forward_only(), [3, 10]) == (10,)
    with pytest.raises(ValueError, match="activation has 1 entries for 2 stages"):
        peak_memory(program, [3])


def test_stages_on_one_rank_hand_over_without_a_hop() -> None:
    actions = tuple(Action(stage, kind, 0) for kind, stage in ((Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.B, 0)))
    assert simulate(Program("one rank", 1, (0, 0), (actions,)), hop=100).step_time == 6


def test_costs_may_differ_by_stage() -> None:
    timeline = simulate(gpipe(2, 1), forward=[1, 10], backward=[100, 1000])
    assert timeline.step_time == 1111
    assert timeline.idle == (1010, 101)


def test_a_split_backward_sends_its_gradient_before_its_weight_half() -> None:
    ranks = tuple(tuple(Action(stage, kind, 0) for kind in (Kind.F, Kind.I, Kind.W)) for stage in range(2))
    program = Program("split", 1, (0, 1), ranks)
    assert simulate(program, forward=1, backward=6).step_time == 1 + 1 + 3 + 3 + 3
    assert simulate(program, forward=1, backward=6, weight_backward=4).step_time == 1 + 1 + 2 + 2 + 4
    assert simulate(program, forward=1, backward=6, input_backward=5).step_time == 1 + 1 + 5 + 5 + 1
    assert simulate(program, forward=1, input_backward=7, weight_backward=9).step_time == 1 + 1 + 7 + 7 + 9
    assert simulate(gpipe(1, 1), forward=1, input_backward=7, weight_backward=9).step_time == 17


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 7), st.integers(0, 9), st.integers(0, 9))
def test_transfers_in_the_lists_change_nothing(name: str, ranks: int, batches: int, forward: int, hop: int) -> None:
    program = build(name, ranks, batches)
    assert simulate(lower(program), forward=forward, hop=hop).ranks == simulate(program, forward=forward, hop=hop).ranks


@settings(deadline=None)
@given(st.sampled_from(FIXED), st.sampled_from([2, 4]), st.integers(1, 7), st.booleans(), st.data())
def test_each_action_starts_as_soon_as_its_rank_is_free_and_what_it_needs_is_there(
    name: str, n_ranks: int, n_microbatches: int, busy: bool, data: st.DataObject
) -> None:
    program = build(name, n_ranks, n_microbatches)
    costs = st.lists(st.integers(0, 9), min_size=program.n_stages, max_size=program.n_stages)
    times = {key: data.draw(costs) for key in ("forward", "input_backward", "weight_backward", "hop", "message_bytes")}
    timeline = simulate(program, **times, bandwidth=2, busy_links=busy)
    ends = {event.action: event.end for events in timeline.ranks for event in events}

    def arrival(action: Action) -> float:
        """When what an action needs is there, but for links that are busy with what was sent before."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.W:
            return ends[Action(stage, Kind.I, microbatch)]
        source = program.previous_stage(stage) if action.kind is Kind.F else program.next_stage(stage)
        if source is None:
            return 0.0 if action.kind is Kind.F else ends[Action(stage, Kind.F, microbatch)]
        kinds = (Kind.F,) if action.kind is Kind.F else (Kind.B, Kind.I)
        (made,) = (ends[key] for kind in kinds if (key := Action(source, kind, microbatch)) in ends)
        if program.placement[source] == program.placement[stage]:
            return made
        boundary = min(source, stage)
        return made + times["message_bytes"][boundary] / 2 + times["hop"][boundary]

    for events in timeline.ranks:
        free = 0.0
        for action, start, end in events:
            if busy:
                assert start >= max(free, arrival(action))
            else:
                assert start == max(free, arrival(action))
            full = times["input_backward"][action.stage] + times["weight_backward"][action.stage]
            kinds = {Kind.F: "forward", Kind.I: "input_backward", Kind.W: "weight_backward"}
            assert end - start == (full if action.kind is Kind.B else times[kinds[action.kind]][action.stage])
            free = end


def test_impossible_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="forward has 3 entries for 2 stages"):
        simulate(gpipe(2, 1), forward=[1, 2, 3])
    with pytest.raises(ValueError, match="forward of stage 1 is -1: it cannot be negative"):
        simulate(gpipe(2, 1), forward=[1, -1])
    with pytest.raises(ValueError, match="hop is -1"):
        simulate(gpipe(2, 1), hop=-1)
    with pytest.raises(ValueError, match="backward less weight_backward of stage 0 is -1"):
        simulate(gpipe(2, 1), backward=2, weight_backward=3)
    with pytest.raises(ValueError, match="forward is nan: give a finite number"):
        simulate(gpipe(2, 1), forward=float("nan"))
    with pytest.raises(ValueError, match="bandwidth of stage 0 is 0"):
        simulate(gpipe(2, 1), bandwidth=0)


def test_a_program_whose_ranks_wait_for_each_other_is_refused() -> None:
    crossed = Program(
        "crossed",
        2,
        (0, 1),
        tuple(tuple(map(Action.parse, line.split())) for line in ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")),
    )
    with pytest.raises(ProgramError) as error:
        simulate(crossed)
    message = str(error.value)
    assert "rank 0 at position 1 waits in 0B0 for the gradient of stage 1, microbatch 0" in message
    assert "rank 1 at position 1 waits in 1F1 for the output of stage 0, microbatch 1" in message


def test_a_big_program_simulates() -> None:
    assert simulate(one_f_one_b(256, 2048)).bubble_ratio == pytest.approx(255 / (2048 + 255), rel=1e-12)
