"""Programs for synchronous transfers: all ranks list what they exchange in one order."""

import pytest

from pypipe.program import (
    Action,
    Channel,
    Kind,
    Program,
    ProgramError,
    build,
    builder_names,
    lower,
    one_f_one_b,
    verify,
)


def program(n_microbatches: int, placement: tuple[int, ...], *lines: str) -> Program:
    return Program("test", n_microbatches, placement, tuple(tuple(map(Action.parse, line.split())) for line in lines))


def check(*lines: str) -> None:
    verify(program(2, (0, 1), *lines), synchronous=True)


def test_1f1b_pairs_the_output_of_one_rank_with_the_gradient_of_the_other() -> None:
    lowered = lower(one_f_one_b(2, 3), synchronous=True)
    assert lowered.text().replace(",", " ").splitlines() == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2",
    ]
    verified = verify(lowered, synchronous=True)
    assert verified.slots == {Channel(Kind.F, 0, 1): 2, Channel(Kind.B, 1, 0): 1}


@pytest.mark.parametrize("name", builder_names())
def test_every_schedule_reaches_its_end_with_every_transfer_blocking_both_ranks(name: str) -> None:
    """So it does wherever a host waits for its device, and whatever few transfers a device holds at once."""
    for n_ranks in range(2, 9):
        if (name == "dualpipe" and n_ranks % 2) or (name == "auto" and n_ranks > 4):
            continue
        for n_microbatches in {1, n_ranks - 1, n_ranks, 2 * n_ranks, 2 * n_ranks + 1, 4 * n_ranks}:
            compute = build(name, n_ranks, n_microbatches)
            for each in (compute, compute.forward_only()):
                lowered = lower(each, synchronous=True)
                slots = verify(lowered, synchronous=True).slots
                fewest = verify(lower(each)).slots
                # A rank of looped BFS takes what has come round before it has ended its first stage.
                most = {channel: n_microbatches if name == "looped_bfs" else fewest[channel] + 2 for channel in slots}
                assert all(count <= most[channel] for channel, count in slots.items())


RANK_0 = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"


def test_opposite_transfers_stand_in_one_order_on_both_ranks() -> None:
    check(RANK_0, "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1")
    crossed = RANK_0, "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    with pytest.raises(ProgramError, match=r"blocks in 0SEND_F1 until rank 1, .*, posts 1RECV_F1"):
        check(*crossed)


def test_a_receive_that_is_posted_early_blocks_its_rank_until_the_send_is_there() -> None:
    # Where a host waits for its device, rank 1 holds 1RECV_F1 before it has run what 0F1 comes after.
    lines = (
        "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    )
    verify(program(2, (0, 1), *lines))
    with pytest.raises(ProgramError) as error:
        check(*lines)
    assert str(error.value).splitlines() == [
        "test: deadlock: rank 0, position 2, 0RECV_B0 never gets to run",
        "  rank 0 at position 2 blocks in 0RECV_B0 until rank 1, which is at position 1, 1RECV_F1, runs 1SEND_B0",
        "  rank 1 at position 1 blocks in 1RECV_F1 until rank 0, which is at position 2, 0RECV_B0, runs 0SEND_F1",
        "  rank 0: 0F0, 0SEND_F0, >0RECV_B0<, 0B0, 0F1, 0SEND_F1, 0RECV_B1 ...",
        "  rank 1: 1RECV_F0, >1RECV_F1<, 1F0, 1B0, 1SEND_B0, 1F1 ...",
    ]


def test_outputs_and_gradients_in_one_direction_share_one_order() -> None:
    # Two ranks in a loop: rank 0 sends rank 1 the outputs of stage 2, and then gradients of stage 2.
    lowered = lower(build("looped_bfs", 2, 2), synchronous=True)
    verify(lowered, synchronous=True)
    actions = list(lowered.ranks[1])
    gradient = next(action for action in actions if action.kind is Kind.RECV_B)
    actions.remove(gradient)
    actions.insert(actions.index(Action(3, Kind.RECV_F, 1)), gradient)
    swapped = Program("swapped", 2, lowered.placement, (lowered.ranks[0], tuple(actions)))
    verify(swapped)  # two links, each in order
    with pytest.raises(ProgramError, match="never gets to run"):
        verify(swapped, synchronous=True)
