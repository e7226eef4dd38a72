"""UNSHARD, RESHARD and REDUCE_GRAD in programs: where they are put, what is refused, what they cost."""

import pytest

from pypipe.program import (
    Action,
    Kind,
    Program,
    ProgramError,
    add_stage_actions,
    build,
    builder_names,
    lower,
    one_f_one_b,
    simulate,
    split_bubble,
    verify,
)


def program(*lines: str) -> Program:
    ranks = tuple(tuple(map(Action.parse, line.split())) for line in lines)
    return Program("test", 2, tuple(range(len(lines))), ranks)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("name", builder_names())
def test_every_schedule_reduces_each_stage_once_after_its_last_gradient(name: str, synchronous: bool) -> None:
    plain = build(name, 4, 8)
    stages = range(plain.n_stages)
    lowered = add_stage_actions(lower(plain, synchronous=synchronous), reduced=stages, sharded=stages)
    verify(lowered, synchronous=synchronous)
    # Nothing else moves, and lowering after them comes to the same.
    assert lowered.compute_only() == plain
    assert lower(lowered.without_transfers(), synchronous=synchronous) == lowered
    for stage in stages:
        if not plain.microbatches_of(stage):
            continue
        own = [action.kind for action in lowered.ranks[lowered.placement[stage]] if action.stage == stage]
        own = [kind for kind in own if not kind.is_transfer]
        assert own.count(Kind.REDUCE_GRAD) == own.count(Kind.UNSHARD) == own.count(Kind.RESHARD) == 1
        assert own[0] is Kind.UNSHARD
        assert own[-2:] == [Kind.REDUCE_GRAD, Kind.RESHARD]
        assert own[-3] in (Kind.B, Kind.W)


def test_they_stand_behind_the_transfers_and_before_the_next_compute_action() -> None:
    lowered = add_stage_actions(lower(one_f_one_b(2, 2)), reduced=[0, 1], sharded=[0])
    assert lowered.text().splitlines() == [
        "0RECV_B0,0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD",
        "1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ]


def test_a_stage_that_lists_them_keeps_its_own_places() -> None:
    listed = lower(program("0UNSHARD 0F0 0RESHARD 0UNSHARD 0F1 0B0 0B1 0RESHARD 0REDUCE_GRAD", "1F0 1F1 1B0 1B1"))
    verify(listed)
    assert add_stage_actions(listed, reduced=[0], sharded=[0]) is listed


def test_forwards_alone_are_gathered_for_and_not_reduced() -> None:
    forward = add_stage_actions(lower(one_f_one_b(2, 2).forward_only()), reduced=[0, 1], sharded=[0, 1])
    verify(forward)
    assert forward.without_transfers().text() == "0UNSHARD,0F0,0F1,0RESHARD\n1UNSHARD,1F0,1F1,1RESHARD"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0F0 0F1 0B0 0REDUCE_GRAD 0B1", "0B1: its gradients come too late for the REDUCE_GRAD at position 3"),
        ("0F0 0F1 0B0 0I1 0REDUCE_GRAD 0W1", "0W1: its gradients come too late"),
        ("0F0 0F1 0B0 0B1 0REDUCE_GRAD 0REDUCE_GRAD", "it stands at position 4 already: gradients are reduced once"),
        ("0F0 0UNSHARD 0F1 0B0 0B1 0RESHARD", "0F0: the stage is not unsharded here; list an UNSHARD before"),
        ("0UNSHARD 0F0 0F1 0RESHARD 0B0 0B1", "0B0: the stage is not unsharded here"),
        ("0UNSHARD 0F0 0UNSHARD 0F1 0B0 0B1 0RESHARD", "0UNSHARD: it has been unsharded since position 0"),
        ("0F0 0F1 0B0 0B1 0RESHARD", "0RESHARD: the stage is not unsharded here"),
        ("0UNSHARD 0F0 0F1 0B0 0B1", "0RESHARD: missing: stage 0 stays unsharded after the step"),
        ("0F0 0F1 0B0 0B1 1REDUCE_GRAD", "1REDUCE_GRAD: stages are 0..0"),
    ],
)
def test_a_wrong_place_is_named(line: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        verify(lower(program(line)))


def test_a_reduction_takes_its_time_and_may_fill_a_bubble() -> None:
    plain = one_f_one_b(4, 8)
    reduced = add_stage_actions(plain, reduced=range(4), sharded=range(4))
    free = simulate(reduced)
    assert free.step_time == simulate(plain).step_time
    # The last rank has ended its last backward 3 B before the first one: its reduction costs the step nothing.
    costs = simulate(reduced, backward=2.0, reduce_grad=[0.0, 0.0, 0.0, 6.0])
    assert costs.step_time == simulate(plain).step_time
    assert costs.bubble_ratio < simulate(plain).bubble_ratio
    assert simulate(reduced, reduce_grad=5.0).step_time == simulate(plain).step_time + 5.0
    assert simulate(reduced, unshard=1.0, reshard=1.0).step_time == simulate(plain).step_time + 2.0
    bubble = split_bubble(costs)
    assert bubble.ratio == pytest.approx(costs.bubble_ratio)
