"""Builders and their registry."""

from collections.abc import Iterator

import pytest

from pypipe.errors import ConfigurationError, PipelineError
from pypipe.program import Program, build, builder_names, gpipe, lower, one_f_one_b, register, verify
from pypipe.program.builders import registry


def test_gpipe_runs_all_forwards_then_all_backwards_in_reverse_order() -> None:
    assert gpipe(2, 3).text().splitlines() == ["0F0,0F1,0F2,0B2,0B1,0B0", "1F0,1F1,1F2,1B2,1B1,1B0"]


def test_1f1b_warms_up_with_one_forward_less_on_each_further_rank() -> None:
    assert one_f_one_b(4, 5).text().splitlines() == [
        "0F0,0F1,0F2,0F3,0B0,0F4,0B1,0B2,0B3,0B4",
        "1F0,1F1,1F2,1B0,1F3,1B1,1F4,1B2,1B3,1B4",
        "2F0,2F1,2B0,2F2,2B1,2F3,2B2,2F4,2B3,2B4",
        "3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,3F4,3B4",
    ]


def test_1f1b_works_with_fewer_microbatches_than_ranks() -> None:
    assert one_f_one_b(4, 2).text().splitlines() == [
        "0F0,0F1,0B0,0B1",
        "1F0,1F1,1B0,1B1",
        "2F0,2F1,2B0,2B1",
        "3F0,3B0,3F1,3B1",
    ]


def test_schedules_are_built_by_name() -> None:
    assert build("gpipe", 2, 3) == gpipe(2, 3)
    assert build("1f1b", 2, 3) == one_f_one_b(2, 3)
    assert {"gpipe", "1f1b"} <= set(builder_names())


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("ZBV", "zbv"),
        ("ZB-V", "zbv"),
        ("ScheduleZBVZeroBubble", "zbv"),
        ("Schedule1F1B", "1f1b"),
        ("interleaved-1f1b", "interleaved"),
        ("Interleaved1F1B", "interleaved"),
        ("ScheduleInterleavedZeroBubble", "interleaved_zb"),
        ("LoopedBFS", "looped_bfs"),
        ("V-Half", "v_half"),
        ("DualPipe V", "dualpipev"),
        ("GPipe", "gpipe"),
    ],
)
def test_a_name_is_known_in_the_spellings_of_papers_and_of_torch(spelled: str, name: str) -> None:
    assert build(spelled, 4, 8) == build(name, 4, 8)


def test_a_name_that_is_nearly_right_gets_a_suggestion() -> None:
    with pytest.raises(
        ValueError, match=r"no schedule is called 'interleave'; did you mean 'interleaved'\?; known are"
    ):
        build("interleave", 2, 2)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no schedule is called 'sequential'; known are naive, gpipe, 1f1b, "):
        build("sequential", 2, 3)


def test_a_registered_builder_gets_its_options_and_a_taken_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))

    @register("own")
    def own(n_ranks: int, n_microbatches: int, *, name: str) -> Program:
        return Program(name, n_microbatches, tuple(range(n_ranks)), ((),) * n_ranks)

    assert build("own", 2, 1, name="mine").name == "mine"
    with pytest.raises(ValueError, match="is taken"):
        register("gpipe")(own)
    assert build("gpipe", 1, 1) == gpipe(1, 1)


LOOPED = ["interleaved", "interleaved_zb", "looped_bfs"]


def numbers(name: str) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Ranks, microbatches and options of a grid, all allowed."""
    for n_ranks in range(1, 9):
        if (name == "dualpipe" and n_ranks % 2) or (name == "auto" and n_ranks > 4):
            continue
        for n_microbatches in [*range(1, 2 * n_ranks + 2), 3 * n_ranks + 1, 4 * n_ranks]:
            for options in [{"stages_per_rank": v} for v in (1, 2, 3)] if name in LOOPED else [{}]:
                yield n_ranks, n_microbatches, options


@pytest.mark.parametrize("name", builder_names())
def test_every_schedule_can_be_lowered_and_verified_whatever_its_numbers(name: str) -> None:
    for n_ranks, n_microbatches, options in numbers(name):
        program = build(name, n_ranks, n_microbatches, **options)
        verify(lower(program))
        if n_ranks < 6:
            verify(lower(program, synchronous=True), synchronous=True)
            verify(lower(program.forward_only()))


def test_interleaved_goes_depth_first_in_groups_of_as_many_microbatches_as_ranks_or_more() -> None:
    assert build("interleaved", 2, 4).text().splitlines() == [
        "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3",
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3",
    ]
    assert build("interleaved", 2, 3).text().splitlines()[1] == "1F0,1F1,1F2,3F0,3B0,3F1,3B1,3F2,3B2,1B0,1B1,1B2"
    assert build("interleaved", 3, 4, stages_per_rank=1).ranks == build("1f1b", 3, 4).ranks


def test_looped_bfs_finishes_a_stage_before_the_next() -> None:
    assert build("looped_bfs", 2, 2).text().splitlines() == [
        "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0",
        "1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0",
    ]


def test_zb_h1_lets_later_ranks_keep_more_weight_halves_waiting() -> None:
    assert build("zb_h1", 3, 3).text().splitlines() == [
        "0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2",
        "1F0,1F1,1I0,1F2,1I1,1W0,1I2,1W1,1W2",
        "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2W1,2W2",
    ]


def test_dualpipe_shares_the_microbatches_between_two_directions() -> None:
    program = build("dualpipe", 4, 9)
    assert program.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert [program.microbatches_of(stage) for stage in (0, 4)] == [range(5), range(5, 9)]
    assert {action.stage for action in program.ranks[1]} == {1, 6}
    # Rank 3 does for the second chain what rank 0 does for the first.
    mirrored = build("dualpipe", 4, 16)
    for here, there in zip(mirrored.ranks[1], mirrored.ranks[2], strict=True):
        assert (here.kind, here.microbatch % 8, (here.stage + 4) % 8) == (there.kind, there.microbatch % 8, there.stage)


@pytest.mark.parametrize("name", builder_names())
def test_numbers_that_do_not_fit_are_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(PipelineError, match="1 rank or more, not 0: give the group's number of processes"):
        build(name, 0, 1)
    with pytest.raises(PipelineError, match="1 microbatch or more, not 0: give the number of slices"):
        build(name, 2, 0)
    with pytest.raises(PipelineError, match=r"1 microbatch or more, not 1\.5: give"):
        build(name, 2, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=f"the schedule {name} has no option 'stages'"):
        build(name, 2, 2, stages=2)


@pytest.mark.parametrize("name", LOOPED)
def test_a_loop_of_no_stages_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="a rank holds 1 stage or more, not 0: give stages_per_rank"):
        build(name, 2, 2, stages_per_rank=0)


def test_dualpipe_on_an_odd_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"even number of ranks, not 3: .*dualpipev takes any"):
        build("dualpipe", 3, 4)
