"""Programs where each pair of ranks has one communicator for both directions and both kinds of traffic."""

import pytest

from pypipe.program import Action, Channel, Kind, Program, ProgramError, build, lower, one_f_one_b, verify


def program(n_microbatches: int, placement: tuple[int, ...], *lines: str) -> Program:
    return Program("test", n_microbatches, placement, tuple(tuple(map(Action.parse, line.split())) for line in lines))


def check(*lines: str) -> None:
    verify(program(2, (0, 1), *lines), single_communicator=True)


def test_1f1b_pairs_the_output_of_one_rank_with_the_gradient_of_the_other() -> None:
    lowered = lower(one_f_one_b(2, 3), single_communicator=True)
    assert lowered.text().replace(",", " ").splitlines() == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2",
    ]
    verified = verify(lowered, single_communicator=True)
    assert verified.slots == {Channel(Kind.F, 0, 1): 2, Channel(Kind.B, 1, 0): 1}


@pytest.mark.parametrize("n_ranks", range(2, 7))
def test_1f1b_needs_no_more_slots_than_with_a_communicator_for_each_link(n_ranks: int) -> None:
    for n_microbatches in (1, n_ranks, 3 * n_ranks):
        compute = one_f_one_b(n_ranks, n_microbatches)
        paired = verify(lower(compute, single_communicator=True), single_communicator=True)
        assert all(count <= verify(lower(compute)).slots[channel] + 1 for channel, count in paired.slots.items())


RANK_0 = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"


def test_opposite_transfers_in_one_group_on_both_ranks_may_stand_in_either_order() -> None:
    check(RANK_0, "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1")
    check(RANK_0, "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1")


def test_opposite_transfers_in_different_groups_have_to_stand_in_one_order() -> None:
    # Rank 0 sends 0F1 before it takes the gradient, rank 1 takes them the other way round.
    with pytest.raises(ProgramError) as error:
        check(
            "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0RECV_B1 0B1",
            "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
        )
    assert str(error.value).splitlines() == [
        "test: deadlock: rank 0, position 2, 0SEND_F0 never gets to run",
        "  rank 0 at position 2 waits for a SEND; its communicator with rank 1, which is at position 1, 1F0, "
        "runs 0RECV_B0",
        "  rank 1 at position 1 waits in 1F0; its communicator with rank 0, which is at position 3, 0F1, runs 1RECV_F0",
        "  rank 0: 0RECV_B0, 0F0, >0SEND_F0<, 0F1, 0SEND_F1, 0B0, 0RECV_B1 ...",
        "  rank 1: 1RECV_F0, >1F0<, 1B0, 1RECV_F1, 1SEND_B0, 1F1 ...",
    ]


def test_a_message_is_there_only_when_its_whole_group_has_ended() -> None:
    # 1RECV_F0 and 1RECV_F1 are one group, but 0F1 comes after the gradient that 1F0 leads to.
    with pytest.raises(ProgramError, match="waits in 1F0; its communicator with rank 0"):
        check(
            "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
            "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        )
    verify(
        program(
            2,
            (0, 1),
            "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
            "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        )
    )


def test_outputs_and_gradients_in_one_direction_share_one_order() -> None:
    # Two ranks in a loop: rank 0 sends rank 1 the outputs of stage 2, and then gradients of stage 2.
    lowered = lower(build("looped_bfs", 2, 2), single_communicator=True)
    verify(lowered, single_communicator=True)
    actions = list(lowered.ranks[1])
    gradient = next(action for action in actions if action.kind is Kind.RECV_B)
    actions.remove(gradient)
    actions.insert(actions.index(Action(3, Kind.RECV_F, 1)), gradient)
    swapped = Program("swapped", 2, lowered.placement, (lowered.ranks[0], tuple(actions)))
    verify(swapped)  # two links, each in order
    with pytest.raises(ProgramError, match="on their one communicator, disagree on order: this is sent where"):
        verify(swapped, single_communicator=True)
