"""Published figures of the schedules: bubbles and activations, as formulas and as tables."""

import pytest

from pypipe.program import Program, Timeline, build, lower, simulate, verify

RANKS = [1, 2, 3, 4, 8]


def peaks(program: Program) -> tuple[int, ...]:
    return verify(lower(program)).peak_activations


def run(program: Program, forward: float = 1.0, input_half: float = 1.0, weight_half: float = 1.0) -> Timeline:
    """The timeline, the given times being those of a rank's whole share of a microbatch."""
    share = program.n_ranks / program.n_stages * len(program.chains)
    return simulate(
        program,
        forward=forward * share,
        backward=(input_half + weight_half) * share,
        input_backward=input_half * share,
        weight_backward=weight_half * share,
    )


def bubble(timeline: Timeline) -> float:
    return max(timeline.idle)


TIMES = [(1, 1, 1), (2, 3, 1.5), (1, 2, 0.5)]  # T_F, T_I, T_W


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p", RANKS)
def test_naive_uses_one_rank_at_a_time_and_keeps_one_activation(p: int, times: tuple[float, float, float]) -> None:
    for m in (1, 2, 5):
        naive = build("naive", p, m)
        assert run(naive, *times).step_time == pytest.approx(m * p * sum(times))
        assert peaks(naive) == (1,) * p


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p", RANKS)
def test_gpipe_and_1f1b_have_the_bubble_of_a_filling_and_draining_pipeline(
    p: int, times: tuple[float, float, float]
) -> None:
    for m in (1, p, 2 * p + 1, 4 * p):
        for name in ("gpipe", "1f1b"):
            assert bubble(run(build(name, p, m), *times)) == pytest.approx((p - 1) * sum(times))
        assert peaks(build("gpipe", p, m)) == (m,) * p
        assert peaks(build("1f1b", p, m)) == tuple(min(m, p - rank) for rank in range(p))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", RANKS)
def test_loops_divide_the_bubble_by_the_stages_on_each_rank(p: int, v: int, times: tuple[float, float, float]) -> None:
    for m in (p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p):
        for name in ("interleaved", "looped_bfs"):
            timeline = run(build(name, p, m, stages_per_rank=v), *times)
            assert bubble(timeline) == pytest.approx((p - 1) * sum(times) / v)
        assert peaks(build("looped_bfs", p, m, stages_per_rank=v)) == (m * v,) * p
        # p A (1 + (p - 1) / (p v)) on rank 0, in stages' shares of A; with v = 1 it is 1F1B.
        most = p * v + p - 1 if v > 1 else p
        if m % p == 0:
            assert peaks(build("interleaved", p, m, stages_per_rank=v))[0] == min(most, m * v)


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (3, 2.5, 2), (2, 3, 1.5)])
@pytest.mark.parametrize("p", RANKS)
def test_zb_h1_and_h2_fill_the_bubble_once_and_twice_with_weight_halves(
    p: int, times: tuple[float, float, float]
) -> None:
    forward, input_half, weight_half = times
    for m in (2 * p, 4 * p):
        span = run(build("zb_h1", p, m), *times).span - m * sum(times)
        assert span == pytest.approx((p - 1) * (forward + input_half - weight_half))
        span = run(build("zb_h2", p, m), *times).span - m * sum(times)
        assert span == pytest.approx((p - 1) * (forward + input_half - 2 * weight_half))
        assert max(peaks(build("zb_h1", p, m))) == p
        assert max(peaks(build("zb_h2", p, m))) == 2 * p - 1


@pytest.mark.parametrize("p", [*RANKS, 16])
def test_zbv_has_no_bubble_at_equal_times_in_the_memory_of_1f1b(p: int) -> None:
    for m in (2 * p, 4 * p):
        program = build("zbv", p, m)
        assert run(program).span == m * 3
        assert max(peaks(program)) == 2 * p


@pytest.mark.parametrize("p", [*range(1, 10), 16, 32])
def test_v_half_and_v_min_trade_memory_for_bubble(p: int) -> None:
    m = 4 * p
    of_1f1b = bubble(run(build("1f1b", p, m)))
    half, least = build("v_half", p, m), build("v_min", p, m)
    assert of_1f1b / 2 - 1 / 2 <= bubble(run(half)) <= of_1f1b / 2
    assert of_1f1b * 2 / 3 - 1 <= bubble(run(least)) <= of_1f1b * 2 / 3 + 1 / 2
    assert max(peaks(half)) == 2 * ((p + 2) // 2)
    assert max(peaks(least)) <= 2 * ((p + 4) // 3)


@pytest.mark.parametrize("times", [(1, 1, 1), (1, 1.5, 1), (1.5, 1, 0.8)])
@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_dualpipe_has_half_the_ranks_of_bubble_and_one_activation_more(
    p: int, times: tuple[float, float, float]
) -> None:
    forward, input_half, weight_half = times
    backward = input_half + weight_half
    for m in (2 * p, 4 * p):
        for name, n_ranks in (("dualpipe", p), ("dualpipev", p // 2)):
            program = build(name, n_ranks, m)
            of_stages = simulate(
                program, forward=forward, backward=backward, input_backward=input_half, weight_backward=weight_half
            )
            # (p / 2 - 1)(FB + B - 3 W) counts an F beside a B as one; here F's output leaves before its B.
            published = (p / 2 - 1) * (forward + backward + backward - 3 * weight_half)
            assert bubble(of_stages) <= published
            if times == (1, 1, 1):
                assert bubble(of_stages) == p / 2 - 1
            assert peaks(program) == (p + 1,) * n_ranks


@pytest.mark.parametrize(
    ("times", "rates"),
    [
        ((18522, 18086, 9337, 601), (0.2431, 0.1585, 0.1083)),
        ((29718, 29444, 19927, 527), (0.2347, 0.1323, 0.0698)),
    ],
)
def test_published_rates_of_profiled_models(times: tuple[int, int, int, int], rates: tuple[float, ...]) -> None:
    # Zero Bubble Pipeline Parallelism, arXiv 2401.10241, table 5: p = 8, m = 24, microseconds.
    forward, input_half, weight_half, hop = times
    work = 24 * (forward + input_half + weight_half)
    for name, rate in zip(("1f1b", "zb_h1", "zb_h2"), rates, strict=True):
        timeline = simulate(
            build(name, 8, 24),
            forward=forward,
            backward=input_half + weight_half,
            input_backward=input_half,
            weight_backward=weight_half,
            hop=hop,
        )
        assert round(1 - work / timeline.span, 4) == rate
