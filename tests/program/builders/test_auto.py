"""The builder that searches: sound, within memory, and never worse than the fixed schedules."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pypipe.program import Program, build, builder_names, lower, simulate, verify

FIXED = [name for name in builder_names() if name != "auto"]

# The zero-bubble paper's profiles (arXiv 2401.10241, table 5): T_F, T_I, T_W and a hop in microseconds, and the rate of
# its automatic search in twice 1F1B's memory.
PROFILES = [((18522, 18086, 9337, 601), 0.0433), ((29718, 29444, 19927, 527), 0.0029)]


def times_of(profile: tuple[float, float, float, float], stages_per_rank: int) -> dict[str, Any]:
    forward, input_backward, weight_backward = (time / stages_per_rank for time in profile[:3])
    return {
        "forward": forward,
        "input_backward": input_backward,
        "weight_backward": weight_backward,
        "hop": profile[3],
    }


@pytest.mark.parametrize(("profile", "published"), PROFILES)
def test_it_is_at_least_as_good_as_zb_2p_in_twice_1f1b_s_memory(
    profile: tuple[float, float, float, float], published: float
) -> None:
    # Activations count until their W here. On a linear placement the last of 8 ranks then has to run 8 W before its
    # last F, which makes that rate impossible; a V-shaped placement reaches it.
    times = times_of(profile, 2)
    program = build("auto", 8, 24, stages_per_rank=2, memory=32, **times)
    timeline = simulate(program, **times)
    assert round(timeline.bubble_ratio_by_span, 4) <= published
    assert max(verify(lower(program)).peak_activations) <= 32


@pytest.mark.parametrize("profile", [profile for profile, _ in PROFILES])
def test_without_a_limit_it_leaves_what_no_order_can_avoid(profile: tuple[float, float, float, float]) -> None:
    forward, input_backward, weight_backward, hop = profile
    times = times_of(profile, 1)
    timeline = simulate(build("auto", 8, 24, effort=0.2, **times), **times)
    # The last rank cannot start before the first forward has passed the others.
    assert timeline.step_time == 7 * (forward + hop) + 24 * (forward + input_backward + weight_backward)


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
@pytest.mark.parametrize("memory", [1, 2, 3, 4, 6, 8])
def test_it_is_never_worse_than_a_fixed_schedule_within_the_same_memory(stages_per_rank: int, memory: int) -> None:
    times = times_of((7, 9, 4, 1), stages_per_rank)
    cap = memory * stages_per_rank
    program = build("auto", 4, 8, stages_per_rank=stages_per_rank, memory=cap, effort=0.02, **times)
    verified = verify(lower(program))
    assert max(verified.peak_activations) <= cap
    best = simulate(program, **times).step_time
    for name in FIXED:
        other = options_of(name, 4, 8, stages_per_rank)
        if other is not None and max(verify(lower(other)).peak_activations) <= cap:
            assert best <= simulate(other, **times).step_time, name


def options_of(name: str, n_ranks: int, n_microbatches: int, stages_per_rank: int) -> Program | None:
    """The schedule, where it has one copy of the model and as many stages a rank."""
    try:
        program = build(name, n_ranks, n_microbatches, stages_per_rank=stages_per_rank)
    except ValueError:
        program = build(name, n_ranks, n_microbatches)
    fits = program.n_stages == n_ranks * stages_per_rank and len(program.chains) == 1
    return program if fits else None


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 2), st.data())
def test_whatever_the_stages_cost_the_program_is_sound_and_within_memory(
    n_ranks: int, n_microbatches: int, per_rank: int, data: st.DataObject
) -> None:
    n_stages = n_ranks * per_rank
    costs = st.lists(st.integers(0, 9), min_size=n_stages, max_size=n_stages)
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=n_stages, max_size=n_stages))
    times: dict[str, Any] = {name: data.draw(costs) for name in ("forward", "input_backward", "weight_backward", "hop")}
    placement = data.draw(st.permutations(list(range(n_ranks)) * per_rank))
    fewest = [sum(sizes[s] for s in range(n_stages) if placement[s] == rank) for rank in range(n_ranks)]
    memory = [least + data.draw(st.integers(0, 20)) for least in fewest]
    program = build(
        "auto", n_ranks, n_microbatches, placement=placement, activation=sizes, memory=memory, effort=0.002, **times
    )
    verify(lower(program))
    timeline = simulate(program, **times)
    assert all(peak <= most for peak, most in zip(timeline.peak_memory(sizes), memory, strict=True))


def test_a_bigger_pipeline_is_searched_by_its_small_likeness() -> None:
    times = times_of((29718, 29444, 19927, 527), 1)
    program = build("auto", 32, 96, memory=64, effort=0.1, **times)
    timeline = simulate(program, **times)
    assert max(timeline.peak_activations) <= 64
    assert timeline.bubble_ratio < simulate(build("zb_h1", 32, 96), **times).bubble_ratio
    assert program == build("auto", 32, 96, memory=64, effort=0.1, **times)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        ValueError, match="memory of rank 0 is 1, but one microbatch's activations of its stages take 2"
    ):
        build("auto", 2, 4, stages_per_rank=2, memory=1)
    with pytest.raises(ValueError, match="memory of rank 0 is nan: give 0 or more"):
        build("auto", 2, 4, memory=float("nan"))
    with pytest.raises(ValueError, match="activation has 3 entries for 2 stages"):
        build("auto", 2, 4, activation=[1, 2, 3])
    with pytest.raises(ValueError, match="1 microbatch or more, not 0"):
        build("auto", 2, 0)
    with pytest.raises(ValueError, match="forward is -1: it cannot be negative"):
        build("auto", 2, 4, forward=-1)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(1, 6), st.integers(1, 2), st.data())
def test_whatever_times_and_memory_it_is_never_worse_than_a_fixed_schedule(
    n_ranks: int, n_microbatches: int, per_rank: int, data: st.DataObject
) -> None:
    n_stages = n_ranks * per_rank
    costs = st.one_of(st.integers(0, 9), st.lists(st.integers(0, 9), min_size=n_stages, max_size=n_stages))
    times: dict[str, Any] = {name: data.draw(costs) for name in ("forward", "input_backward", "weight_backward", "hop")}
    memory = data.draw(st.integers(per_rank, per_rank * (2 * n_ranks + 1)))
    program = build("auto", n_ranks, n_microbatches, stages_per_rank=per_rank, memory=memory, effort=0.002, **times)
    assert max(verify(lower(program)).peak_activations) <= memory
    found = simulate(program, **times).step_time
    for name in FIXED:
        try:
            other = options_of(name, n_ranks, n_microbatches, per_rank)
        except ValueError:  # dualpipe on an odd number of ranks
            continue
        if other is not None and max(verify(lower(other)).peak_activations) <= memory:
            assert found <= simulate(other, **times).step_time, name
