"""Builders and their registry."""

import pytest

from pypipe.program import Program, build, builder_names, gpipe, one_f_one_b, register, registry


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


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no schedule is called 'f1b'; known are naive, gpipe, 1f1b, "):
        build("f1b", 2, 3)


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


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fewer_than_one_rank_or_microbatch_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ValueError, match="1 rank or more, not 0: give the group's number of processes"):
        build(name, 0, 1)
    with pytest.raises(ValueError, match="1 microbatch or more, not 0: give the number of slices"):
        build(name, 1, 0)
