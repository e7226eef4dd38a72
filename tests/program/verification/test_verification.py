"""What the verifier rejects, and how it says so."""

import pytest

from pypipe.program import Action, Channel, Kind, Program, ProgramError, build, lower, one_f_one_b, verify


def program(n_microbatches: int, placement: tuple[int, ...], *lines: str) -> Program:
    return Program("test", n_microbatches, placement, tuple(tuple(map(Action.parse, line.split())) for line in lines))


SOUND_0 = "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0RECV_B1 0B1"
SOUND_1 = "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1"


def test_a_sound_program_is_verified_with_its_slots_and_peaks() -> None:
    sound = program(2, (0, 1), SOUND_0, SOUND_1)
    verified = verify(sound)
    assert verified.program is sound
    assert verified.slots == {Channel(Kind.F, 0, 1): 1, Channel(Kind.B, 1, 0): 1}
    assert verified.peak_activations == (2, 1)


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "message"),
    [
        (SOUND_0.replace(" 0B1", ""), SOUND_1, r"rank 0, position 7, 0B1: missing"),
        (SOUND_0 + " 0B1", SOUND_1, r"rank 0, position 8, 0B1: it stands at position 7 already"),
        (
            SOUND_0 + " 0W1",
            SOUND_1,
            r"rank 0, position 8, 0W1: the full backward at position 7 does this too",
        ),
        (SOUND_0.replace(" 0B1", " 0I1"), SOUND_1, r"rank 0, position 8, 0W1: missing"),
        (SOUND_0.replace(" 0B1", " 0W1"), SOUND_1, r"rank 0, position 8, 0I1: missing"),
        (
            SOUND_0.replace(" 0B1", " 0W1 0I1"),
            SOUND_1,
            r"rank 0, position 7, 0W1: it needs 0I1, which comes later",
        ),
        (SOUND_0 + " 2F0", SOUND_1, r"rank 0, position 8, 2F0: stages are 0\.\.1"),
        (SOUND_0 + " 0F2", SOUND_1, r"rank 0, position 8, 0F2: the microbatches of stage 0 are 0\.\.1"),
        (SOUND_0 + " 1F0", SOUND_1, r"1F0: stage 1 is placed on rank 1, so only that rank can run this"),
        (
            SOUND_0.replace(" 0SEND_F1", ""),
            SOUND_1,
            r"rank 0, position 3, 0F1: rank 0 lists no 0SEND_F1 for it",
        ),
        (
            SOUND_0,
            SOUND_1.replace("1RECV_F1 ", ""),
            r"rank 0, position 4, 0SEND_F1: rank 1 lists no 1RECV_F1",
        ),
        (SOUND_0 + " 0SEND_B0", SOUND_1, r"rank 0, position 8, 0SEND_B0: there is nothing to send"),
        ("0RECV_F0 " + SOUND_0, SOUND_1, r"rank 0, position 0, 0RECV_F0: there is nothing to receive"),
        (SOUND_0, "1RECV_B0 " + SOUND_1, r"rank 1, position 0, 1RECV_B0: there is nothing to receive"),
        (SOUND_0.replace("0F0 0SEND_F0", "0SEND_F0 0F0"), SOUND_1, r"0SEND_F0: it sends what is made later"),
        (SOUND_0, SOUND_1.replace("1RECV_F0 1F0", "1F0 1RECV_F0"), r"1RECV_F0: its message is used earlier"),
        (
            SOUND_0,
            "1RECV_F1 " + SOUND_1.replace(" 1RECV_F1", ""),
            r"0SEND_F0: the two ends of link F from rank 0 to rank 1 disagree on order: this is sent where",
        ),
    ],
)
def test_a_fault_is_named_by_rank_position_and_action(rank_0: str, rank_1: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message) as error:
        verify(program(2, (0, 1), rank_0, rank_1))
    rank, position, action = error.value.rank, error.value.position, error.value.action
    assert rank is not None
    assert f"rank {rank}, position {position}, {action}: " in str(error.value)
    assert ">" in str(error.value)


def test_a_fault_between_two_ranks_shows_both_lists_with_a_mark() -> None:
    with pytest.raises(ProgramError) as error:
        verify(program(2, (0, 1), SOUND_0, "1RECV_F1 " + SOUND_1.replace(" 1RECV_F1", "")))
    assert str(error.value).splitlines()[1:] == [
        "  rank 0: 0RECV_B0, 0F0, >0SEND_F0<, 0F1, 0SEND_F1, 0B0, 0RECV_B1 ...",
        "  rank 1: >1RECV_F1<, 1RECV_F0, 1F0, 1B0, 1SEND_B0 ...",
    ]


def test_a_missing_action_is_shown_at_the_end_of_its_ranks_list() -> None:
    with pytest.raises(ProgramError, match=r"  rank 0: \.\.\. 0F1, 0SEND_F1, 0B0, 0RECV_B1, >end<"):
        verify(program(2, (0, 1), SOUND_0.replace(" 0B1", ""), SOUND_1))


def test_two_neighbours_that_send_to_each_other_before_they_post_are_a_deadlock() -> None:
    # A rank that posts its receives only when it needs them: 1F1B's classic deadlock without buffering.
    late = program(
        2,
        (0, 1),
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    with pytest.raises(ProgramError) as error:
        verify(late)
    assert (error.value.rank, error.value.position, str(error.value.action)) == (0, 3, "0SEND_F1")
    assert str(error.value).splitlines() == [
        "test: deadlock: rank 0, position 3, 0SEND_F1 never gets to run",
        "  rank 0 at position 3 blocks in 0SEND_F1 until rank 1, which is at position 3, 1SEND_B0, posts 1RECV_F1",
        "  rank 1 at position 3 blocks in 1SEND_B0 until rank 0, which is at position 3, 0SEND_F1, posts 0RECV_B0",
        "  rank 0: 0F0, 0SEND_F0, 0F1, >0SEND_F1<, 0RECV_B0, 0B0, 0RECV_B1, 0B1",
        "  rank 1: 1RECV_F0, 1F0, 1B0, >1SEND_B0<, 1RECV_F1, 1F1, 1B1, 1SEND_B1",
    ]
    assert verify(lower(late.compute_only())).slots[Channel(Kind.F, 0, 1)] == 1


def test_ranks_whose_orders_need_each_other_are_a_deadlock() -> None:
    crossed = program(2, (0, 1), "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    for synchronous in (False, True):
        with pytest.raises(ProgramError, match="deadlock: rank 0, position 1, 0B0 never gets to run") as error:
            lower(crossed, synchronous=synchronous)
        message = str(error.value)
        assert "waits in 0B0 for 1B0 of rank 1, which is at position 1, 1F1" in message
        assert "waits in 1F1 for 0F1 of rank 0, which is at position 1, 0B0" in message


def test_lowered_ranks_whose_orders_need_each_other_are_a_deadlock() -> None:
    crossed = program(
        2,
        (0, 1),
        "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0B0 0F1 0SEND_F1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    with pytest.raises(ProgramError) as error:
        verify(crossed)
    message = str(error.value)
    assert "blocks in 0B0 until rank 1, which is at position 3, 1F1, runs 1SEND_B0" in message
    assert "blocks in 1F1 until rank 0, which is at position 4, 0B0, runs 0SEND_F1" in message


def test_a_receive_takes_a_slot_where_it_stands() -> None:
    early = program(2, (0, 1), SOUND_0, SOUND_1.replace(" 1RECV_F1", "").replace("1F0", "1RECV_F1 1F0"))
    assert verify(early).slots == {Channel(Kind.F, 0, 1): 2, Channel(Kind.B, 1, 0): 1}


def test_a_deadlock_of_many_ranks_is_told_by_its_first_few() -> None:
    n_ranks = 12
    lines = [f"{stage}F0 {stage}B0 {stage}F1 {stage}B1" for stage in range(n_ranks - 1)]
    crossed = program(2, tuple(range(n_ranks)), *lines, "11F0 11F1 11B0 11B1")
    with pytest.raises(ProgramError, match="and 4 more ranks"):
        verify(lower(crossed))


def test_a_program_without_transfers_is_sent_to_lower() -> None:
    with pytest.raises(ProgramError, match=r"rank 0 lists no 0SEND_F0 for it; lower\(\) inserts transfers"):
        verify(one_f_one_b(2, 1))


def test_a_forward_only_program_carries_no_gradients() -> None:
    with pytest.raises(ProgramError, match=r"1SEND_B0: there is nothing to send"):
        verify(program(1, (0, 1), "0F0 0SEND_F0", "1RECV_F0 1F0 1SEND_B0"))
    with pytest.raises(ProgramError, match=r"0RECV_B0: there is nothing to receive"):
        verify(program(1, (0, 1), "0RECV_B0 0F0 0SEND_F0", "1RECV_F0 1F0"))


def test_stages_on_one_rank_have_to_come_in_the_order_of_their_needs() -> None:
    with pytest.raises(ProgramError, match=r"1F0: it needs 0F0, which comes later, at position 1"):
        verify(program(1, (0, 0), "1F0 0F0 1B0 0B0"))
    with pytest.raises(ProgramError, match=r"0B0: it needs 1B0, which comes later, at position 3"):
        verify(program(1, (0, 0), "0F0 1F0 0B0 1B0"))
    with pytest.raises(ProgramError, match=r"0SEND_F0: there is nothing to send"):
        verify(program(1, (0, 0), "0F0 0SEND_F0 1F0 1B0 0B0"))


def test_verified_slots_cannot_be_changed() -> None:
    slots = verify(lower(one_f_one_b(2, 1))).slots
    with pytest.raises(TypeError):
        slots[Channel(Kind.F, 0, 1)] = 5  # type: ignore[index]


def test_a_big_program_is_lowered_and_verified() -> None:
    verified = verify(lower(build("interleaved", 64, 512, stages_per_rank=2)))
    assert sum(map(len, verified.program.ranks)) == 2 * 128 * 512 + 4 * 127 * 512
