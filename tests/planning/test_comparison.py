"""Schedules side by side: figures, units, memory, and what cannot be built."""

import pytest

from pypipe.planning import PlanError, Request, Row, Traffic, advise, compare
from pypipe.program import builder_names, gpipe, one_f_one_b, register, simulate
from pypipe.program.builders import registry
from pypipe.program.programs import Program

# Published bubble rates by span (zero bubble, arXiv 2401.10241, table 5; p = 8, m = 24), in microseconds.
PROFILES = [
    ((18522, 18086, 9337, 601), {"1f1b": 0.2431, "zb_h1": 0.1585, "zb_h2": 0.1083}, 0.0433),
    ((29718, 29444, 19927, 527), {"1f1b": 0.2347, "zb_h1": 0.1323, "zb_h2": 0.0698}, 0.0029),
]


def request(times: tuple[float, float, float, float], **options: object) -> Request:
    forward, input_backward, weight_backward, hop = times
    return Request(8, 24, (forward,), (input_backward,), (weight_backward,), hop, **options)  # type: ignore[arg-type]


def rows_of(asked: Request, *, search: bool = False) -> dict[str, Row]:
    return {row.name: row for row in compare(asked, search=search).rows}


@pytest.mark.parametrize(("times", "rates", "searched"), PROFILES)
def test_published_rates_are_reproduced_and_the_search_reaches_its_own(
    times: tuple[float, float, float, float], rates: dict[str, float], searched: float
) -> None:
    asked = request(times, memory=16)
    rows = rows_of(asked, search=True)
    for name, rate in rates.items():
        assert round(rows[name].bubble_ratio_by_span, 4) == rate
    auto = rows["auto"]
    assert auto.verified
    assert auto.fits
    assert max(auto.peak_activations) <= 16
    assert round(auto.bubble_ratio_by_span, 4) <= searched
    assert all(auto.step_time <= row.step_time for row in rows.values() if row.fits)
    assert auto.is_best


def test_every_registered_schedule_has_a_row_or_a_reason() -> None:
    comparison = compare(Request(3, 4), search=False)
    names = [row.name for row in comparison.rows] + [name for name, _ in comparison.unavailable]
    assert sorted([*names, "auto"]) == sorted(builder_names())
    assert [name for name, _ in comparison.unavailable] == ["dualpipe"]
    assert "even number of ranks, not 3" in comparison.unavailable[0][1]


def test_times_and_activations_are_those_of_a_whole_rank_whatever_v_is() -> None:
    rows = rows_of(Request(4, 8, (6.0,), (6.0,), (6.0,)))
    for row in rows.values():
        work = row.step_time * (1 - row.bubble_ratio)
        assert work == pytest.approx(8 * 18), row.name
    # Interleaved's rank 0 holds p A (1 + (p - 1) / (p v)) (Megatron-LM, arXiv 2104.04473, section 2.2).
    assert rows["interleaved"].peak_activations[0] == 4 * (1 + 3 / 8)
    assert rows["zbv"].peak_activations == (4, 4, 4, 4)
    assert rows["zbv"].bubble_ratio_by_span == 0
    assert rows["gpipe"].peak_activations == (8, 8, 8, 8)
    assert rows["1f1b"].peak_activations == (4, 3, 2, 1)
    assert rows["1f1b"].step_time == simulate(one_f_one_b(4, 8), forward=6, backward=12).step_time
    assert {rows["gpipe"].transfers, rows["dualpipe"].transfers} == {2 * 3 * 8}
    assert rows["zbv"].transfers == 2 * 6 * 8
    assert (rows["dualpipe"].copies, rows["zbv"].stages_per_rank) == (2, 2)


def test_v_is_that_of_the_schedules_that_let_one_choose() -> None:
    rows = rows_of(Request(4, 8, stages_per_rank=3))
    assert {name: row.stages_per_rank for name, row in rows.items() if row.stages_per_rank > 1} == {
        "interleaved": 3,
        "interleaved_zb": 3,
        "looped_bfs": 3,
        "zbv": 2,
        "v_half": 2,
        "v_min": 2,
        "dualpipev": 2,
    }


def test_unequal_pieces_keep_their_place_in_the_model() -> None:
    # The last quarter of the model is the slow one: in a V-shaped placement it is shared by all ranks but the middle.
    asked = Request(4, 8, (1, 1, 1, 5), (1, 1, 1, 5), (1, 1, 1, 5))
    rows = rows_of(asked)
    assert rows["gpipe"].step_time == simulate(gpipe(4, 8), forward=[1, 1, 1, 5], backward=[2, 2, 2, 10]).step_time
    assert rows["zbv"].step_time < rows["zb_h1"].step_time
    assert any("Piece 3 of the model takes 150% more than the mean" in sentence for sentence in advise(compare(asked)))


@pytest.mark.parametrize("memory", [0.5, 1, 2, 3.5, 4, 8])
def test_the_best_within_memory_is_marked_and_what_does_not_fit_comes_last(memory: float) -> None:
    comparison = compare(Request(4, 8, (3,), (4,), (2,), 0.5, memory=memory))
    fitting = [row for row in comparison.rows if max(row.peak_activations) <= memory]
    assert [row.fits for row in comparison.rows] == [True] * len(fitting) + [False] * (
        len(comparison.rows) - len(fitting)
    )
    assert [row.is_best for row in comparison.rows] == [
        index == 0 and bool(fitting) for index in range(len(comparison.rows))
    ]
    if fitting:
        assert comparison.best is not None
        assert comparison.best.step_time == min(row.step_time for row in fitting)
    else:
        assert "auto" in dict(comparison.unavailable)
        assert "No schedule fits into a memory of 0.5 A: naive needs the least, 1 A." in advise(comparison)[0]


def test_memory_may_be_in_gb_of_each_piece_of_the_model() -> None:
    asked = Request(4, 8, memory=12.0, activation=(4.0, 1.0, 1.0, 6.0))
    rows = rows_of(asked, search=True)
    assert rows["1f1b"].peak_activations == (4, 3, 2, 1)
    assert rows["1f1b"].peak_memory == (16, 3, 2, 6)
    assert rows["zb_h1"].peak_memory == (16, 4, 4, 24)
    # Rank 0 holds half a first and half a last piece, 5 GB a microbatch.
    assert rows["zbv"].peak_memory[0] > 12
    assert [name for name, row in rows.items() if row.fits] == ["auto", "v_min", "naive"]
    assert max(rows["auto"].peak_memory) <= 12
    assert rows["auto"].step_time < rows["v_min"].step_time


def test_a_schedule_of_ones_own_takes_part_and_one_with_a_fault_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))

    @register("own")
    def own(n_ranks: int, n_microbatches: int) -> Program:
        return gpipe(n_ranks, n_microbatches)

    @register("empty")
    def empty(n_ranks: int, n_microbatches: int) -> Program:
        return Program("empty", n_microbatches, tuple(range(n_ranks)), ((),) * n_ranks)

    @register("needy")
    def needy(n_ranks: int, n_microbatches: int, *, depth: int) -> Program:
        return gpipe(n_ranks, n_microbatches * depth)

    comparison = compare(Request(2, 2), search=False)
    assert "own" in [row.name for row in comparison.rows]
    reasons = dict(comparison.unavailable)
    assert "missing" in reasons["empty"]
    assert "depth" in reasons["needy"]


def test_bytes_over_bandwidth_take_time_and_a_link_carries_one_message_at_a_time() -> None:
    # 8 x 2048 x 8192 in bf16: 268 MB over each cut in each direction; 3 cuts move 1.6 GB a step.
    traffic = Traffic(8, 2048, 8192, "bf16", bandwidth=1)
    assert traffic.cut_bytes == 268_435_456
    assert traffic.step_bytes(3) == 1_610_612_736
    slow = rows_of(Request(4, 8, (1,), (1,), (1,), unit="ms", traffic=traffic))["gpipe"]
    # A microbatch's 33.6 MB take 33.6 ms at 1 GB/s: the links are the bottleneck. The last of 8 messages arrives
    # after 1 + 3 hops' worth of F, and 10 messages; and the same way back.
    message = traffic.cut_bytes / 8 / 1e6
    assert slow.step_time == pytest.approx(2 * (10 * message) + 4 + 8)
    unlimited = Request(4, 8, unit="ms", traffic=Traffic(8, 2048, 8192))
    assert rows_of(unlimited)["gpipe"].step_time == 11 * 3


def test_advice_is_given_where_it_applies() -> None:
    few = " ".join(advise(compare(Request(8, 8), search=False)))
    assert "M = 8 is less than 4P = 32" in few
    assert "46.7% here, 17.9% with M = 32 and 9.9% with M = 8P = 64" in few  # (P-1) / (M+P-1)
    assert "effective batch is M x the microbatch" in few
    many = " ".join(advise(compare(Request(2, 8, traffic=Traffic(16, 4, 4)), search=False)))
    assert "less than 4P" not in many
    assert "here 8 x 2 = 16 sequences" in many
    assert "A batch of 4 sequences cannot be cut into 8 microbatches" in " ".join(
        advise(compare(Request(2, 8, traffic=Traffic(4, 4, 4)), search=False))
    )
    assert advise(compare(Request(1, 1), search=False)) == []
    assert "waits for messages on their way" in " ".join(advise(compare(Request(4, 16, hop=5.0), search=False)))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"n_ranks": 0}, "-p is 0: give the number of ranks"),
        ({"n_microbatches": 0}, "-m is 0: give the number of microbatches"),
        ({"stages_per_rank": 0}, "-v is 0: give the number of stages"),
        ({"forward": (-1.0,)}, "--tf is -1: give a time from 0 on"),
        ({"input_backward": (float("nan"),)}, "--tb is nan"),
        ({"weight_backward": (float("inf"),)}, "--tw is inf"),
        ({"hop": -2.0}, "--tc is -2"),
        ({"forward": (1.0, 2.0, 3.0)}, "--tf has 3 times for 4 ranks"),
        ({"forward": (0.0,), "input_backward": (0.0,), "weight_backward": (0.0,)}, "are all 0"),
        ({"memory": 0.0}, "--memory is 0"),
        ({"memory": float("nan")}, "--memory is nan"),
        ({"activation": (0.0,)}, "--activation is 0: give GB above 0"),
        ({"activation": (1.0, 2.0)}, "--activation has 2 sizes for 4 ranks"),
        ({"memory": -1.0, "activation": (1.0,)}, "--memory is -1: give GB above 0"),
        ({"unit": "days"}, "--unit is 'days': give one of us, ms, s"),
        ({"traffic": Traffic(0, 1, 1)}, "--batch is 0"),
        ({"traffic": Traffic(1, 1, 1, "int4")}, "--dtype is 'int4': give one of"),
        ({"traffic": Traffic(1, 1, 1, bandwidth=1.0)}, "give the unit of the times too"),
        ({"traffic": Traffic(1, 1, 1, bandwidth=-1.0), "unit": "s"}, "--bandwidth is -1"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, object], remedy: str) -> None:
    with pytest.raises(PlanError) as error:
        Request(**{"n_ranks": 4, "n_microbatches": 8, **options})  # type: ignore[arg-type]
    assert remedy in str(error.value)
    assert "\n" not in str(error.value)
