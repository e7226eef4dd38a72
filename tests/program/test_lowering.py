"""Where lowering puts the transfers."""

import pytest

from pypipe.program import (
    Action,
    Channel,
    Kind,
    Program,
    ProgramError,
    build,
    gpipe,
    lower,
    one_f_one_b,
    verify,
)

NAMES = ["gpipe", "1f1b"]


def program(n_microbatches: int, placement: tuple[int, ...], *lines: str) -> Program:
    return Program("test", n_microbatches, placement, tuple(tuple(map(Action.parse, line.split())) for line in lines))


def lines(lowered: Program) -> list[str]:
    return lowered.text().replace(",", " ").splitlines()


def test_1f1b_posts_a_receive_as_soon_as_a_slot_is_free_and_before_it_sends() -> None:
    assert lines(lower(one_f_one_b(3, 4))) == [
        "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0B0 0RECV_B1 0F3 0SEND_F3 0B1 0RECV_B2 0B2 0RECV_B3 0B3",
        "1RECV_F0 1RECV_F1 1RECV_B0 1F0 1SEND_F0 1F1 1SEND_F1 1B0 1RECV_F2 1RECV_B1 1SEND_B0 1F2 1SEND_F2 "
        "1B1 1RECV_F3 1RECV_B2 1SEND_B1 1F3 1SEND_F3 1B2 1RECV_B3 1SEND_B2 1B3 1SEND_B3",
        "2RECV_F0 2F0 2B0 2RECV_F1 2SEND_B0 2F1 2B1 2RECV_F2 2SEND_B1 2F2 2B2 2RECV_F3 2SEND_B2 2F3 2B3 2SEND_B3",
    ]


def test_gpipe_receives_every_activation_at_once_and_gradients_one_by_one() -> None:
    assert lines(lower(gpipe(2, 3))) == [
        "0RECV_B2 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0B2 0RECV_B1 0B1 0RECV_B0 0B0",
        "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2 1B2 1SEND_B2 1B1 1SEND_B1 1B0 1SEND_B0",
    ]


def test_a_forward_only_program_gives_its_slot_back_after_each_forward() -> None:
    lowered = lower(gpipe(3, 2).forward_only())
    assert lines(lowered) == [
        "0F0 0SEND_F0 0F1 0SEND_F1",
        "1RECV_F0 1F0 1RECV_F1 1SEND_F0 1F1 1SEND_F1",
        "2RECV_F0 2F0 2RECV_F1 2F1",
    ]
    assert set(verify(lowered).slots.values()) == {1}


def test_a_split_backward_sends_after_its_input_half_and_holds_its_slots_until_its_weight_half() -> None:
    split = program(2, (0, 1), "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    lowered = lower(split)
    assert lines(lowered) == [
        "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0I0 0W0 0RECV_B1 0I1 0W1",
        "1RECV_F0 1RECV_F1 1F0 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1",
    ]
    assert verify(lowered).slots == {Channel(Kind.F, 0, 1): 2, Channel(Kind.B, 1, 0): 1}


def test_a_rank_may_split_some_backwards_and_not_others() -> None:
    mixed = program(2, (0, 1), "0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1W0 1F1 1B1")
    assert verify(lower(mixed)).peak_activations == (2, 1)


def test_stages_on_one_rank_hand_over_in_memory() -> None:
    v_shaped = program(1, (0, 1, 1, 0), "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    assert lines(lower(v_shaped)) == [
        "3RECV_F0 0RECV_B0 0F0 0SEND_F0 3F0 3B0 3SEND_B0 0B0",
        "1RECV_F0 2RECV_B0 1F0 2F0 2SEND_F0 2B0 1B0 1SEND_B0",
    ]
    assert verify(lower(v_shaped)).peak_activations == (2, 2)


def test_two_channels_of_one_link_share_one_order() -> None:
    looped = program(
        2,
        (0, 1, 0, 1),
        "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0",
        "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0",
    )
    lowered = lower(looped)
    assert "1RECV_F0 1RECV_F1 3RECV_F0 3RECV_F1" in lines(lowered)[1]
    verify(lowered)


def test_a_message_used_later_than_one_sent_after_it_keeps_a_slot_while_it_waits() -> None:
    swapped = program(2, (0, 1), "0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0")
    lowered = lower(swapped)
    assert lines(lowered)[1] == "1RECV_F0 1RECV_F1 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0"
    assert verify(lowered).slots[Channel(Kind.F, 0, 1)] == 2


@pytest.mark.parametrize("n_ranks", range(1, 9))
def test_1f1b_needs_min_m_p_minus_rank_forward_slots_and_one_gradient_slot(n_ranks: int) -> None:
    for n_microbatches in range(1, 21):
        verified = verify(lower(one_f_one_b(n_ranks, n_microbatches)))
        assert verified.slots == {
            **{Channel(Kind.F, r - 1, r): min(n_microbatches, n_ranks - r) for r in range(1, n_ranks)},
            **{Channel(Kind.B, r + 1, r): 1 for r in range(n_ranks - 1)},
        }
        assert verified.peak_activations == tuple(min(n_microbatches, n_ranks - r) for r in range(n_ranks))


@pytest.mark.parametrize("n_ranks", range(1, 9))
def test_gpipe_needs_m_forward_slots_and_one_gradient_slot(n_ranks: int) -> None:
    for n_microbatches in range(1, 21):
        verified = verify(lower(gpipe(n_ranks, n_microbatches)))
        assert verified.slots == {
            **{Channel(Kind.F, r - 1, r): n_microbatches for r in range(1, n_ranks)},
            **{Channel(Kind.B, r + 1, r): 1 for r in range(n_ranks - 1)},
        }
        assert verified.peak_activations == (n_microbatches,) * n_ranks


@pytest.mark.parametrize(("n_ranks", "n_microbatches"), [(2, 3), (2, 4), (4, 8), (4, 16), (8, 32)])
def test_looped_bfs_keeps_the_gradients_that_reach_the_last_rank_before_it_can_take_them(
    n_ranks: int, n_microbatches: int
) -> None:
    # Rank 0 returns gradients of its second stage while the last rank is still at its own second stage. With
    # one slot each rank would wait in a SEND.
    verified = verify(lower(build("looped_bfs", n_ranks, n_microbatches)))
    turn = Channel(Kind.B, n_ranks, n_ranks - 1)
    assert verified.slots[turn] == max(1, n_microbatches - 2 * (n_ranks - 1))
    assert all(count == 1 for channel, count in verified.slots.items() if channel.kind is Kind.B and channel != turn)


def test_zb_h2_sends_one_activation_ahead_of_those_in_use() -> None:
    verified = verify(lower(build("zb_h2", 4, 8)))
    assert [verified.slots[Channel(Kind.F, rank - 1, rank)] for rank in (1, 2, 3)] == [8, 8, 8]
    assert verified.peak_activations == (7, 7, 7, 7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_ranks", range(1, 9))
def test_evaluation_needs_one_slot_and_one_activation_whatever_the_schedule(name: str, n_ranks: int) -> None:
    for n_microbatches in range(1, 21):
        verified = verify(lower(build(name, n_ranks, n_microbatches).forward_only()))
        assert verified.slots == {Channel(Kind.F, r - 1, r): 1 for r in range(1, n_ranks)}
        assert verified.peak_activations == (1,) * n_ranks


def test_lowering_a_lowered_program_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1f1b has transfers already, such as 0RECV_B0"):
        lower(lower(one_f_one_b(2, 2)))


def test_lowering_an_incomplete_program_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"rank 1, position 3, 1B1: missing"):
        lower(program(2, (0, 1), "0F0 0F1 0B0 0B1", "1F0 1F1 1B0"))
