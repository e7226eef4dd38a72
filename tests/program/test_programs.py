"""Programs, channels and links as data."""

from dataclasses import replace

import pytest

from pypipe.program import (
    Action,
    Chain,
    Channel,
    Kind,
    Link,
    Program,
    channel_of,
    gpipe,
    lower,
    one_f_one_b,
    simulate,
    verify,
)


def test_a_program_shows_its_ranks_as_lines() -> None:
    assert gpipe(2, 2).text() == "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0"


def test_a_program_knows_its_numbers_and_neighbours() -> None:
    program = gpipe(3, 2)
    assert (program.n_ranks, program.n_stages, program.n_microbatches) == (3, 3, 2)
    assert [program.previous_stage(stage) for stage in range(3)] == [None, 0, 1]
    assert [program.next_stage(stage) for stage in range(3)] == [1, 2, None]
    assert program.microbatches_of(1) == range(2)


def test_the_digest_changes_with_actions_and_placement_and_not_with_the_name() -> None:
    program = Program("a", 1, (0, 1), ((Action(0, Kind.F, 0),), (Action(1, Kind.F, 0),)))
    assert program.digest() == replace(program, name="b").digest()
    assert program.digest() != replace(program, placement=(1, 0)).digest()
    assert program.digest() != replace(program, ranks=program.ranks[::-1]).digest()
    assert program.digest() != replace(program, n_microbatches=2, chains=()).digest()
    assert len(program.digest()) == 64
    assert program.digest() == gpipe(2, 1).forward_only().digest()


def test_forward_only_keeps_the_forwards_in_order_and_drops_transfers() -> None:
    program = one_f_one_b(2, 3)
    assert program.forward_only().text() == "0F0,0F1,0F2\n1F0,1F1,1F2"
    assert lower(program).forward_only() == program.forward_only()


def test_compute_only_undoes_lowering() -> None:
    program = one_f_one_b(3, 4)
    assert lower(program).compute_only() == program


@pytest.mark.parametrize(
    ("text", "channel", "link"),
    [
        ("1SEND_F0", Channel(Kind.F, 1, 2), Link(Kind.F, 1, 0)),
        ("2RECV_F0", Channel(Kind.F, 1, 2), Link(Kind.F, 1, 0)),
        ("2SEND_B0", Channel(Kind.B, 2, 1), Link(Kind.B, 0, 1)),
        ("1RECV_B0", Channel(Kind.B, 2, 1), Link(Kind.B, 0, 1)),
    ],
)
def test_a_transfer_names_its_channel_and_the_placement_names_the_link(text: str, channel: Channel, link: Link) -> None:
    looped = Program("looped", 1, (0, 1, 0, 1), ((), ()))
    assert channel_of(Action.parse(text)) == channel
    assert looped.link_of(channel) == link


def test_a_compute_action_has_no_channel() -> None:
    with pytest.raises(ValueError, match="2F0 is not a transfer"):
        channel_of(Action.parse("2F0"))


@pytest.mark.parametrize(
    ("n_microbatches", "placement", "n_ranks", "message"),
    [
        (0, (0,), 1, "1 microbatch or more, not 0"),
        (1, (), 1, "1 stage or more"),
        (1, (0,), 0, "1 rank or more"),
        (1, (0, 2), 2, "stage 1 is placed on rank 2, but the ranks are 0..1"),
        (1, (-1,), 1, "stage 0 is placed on rank -1"),
    ],
)
def test_a_program_with_impossible_numbers_cannot_be_made(
    n_microbatches: int, placement: tuple[int, ...], n_ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Program("broken", n_microbatches, placement, ((),) * n_ranks)


def bidirectional() -> Program:
    """Two ranks, two copies of the model: microbatches 0 and 1 go from rank 0 to 1, microbatch 2 from 1 to 0."""
    lines = "0F0 0F1 3F2 3B2 0B0 0B1", "2F2 1F0 1B0 1F1 1B1 2B2"
    ranks = tuple(tuple(map(Action.parse, line.split())) for line in lines)
    return Program("both ways", 3, (0, 1, 1, 0), ranks, (Chain(range(2), range(2)), Chain(range(2, 4), range(2, 3))))


def test_a_second_chain_has_stages_and_microbatches_of_its_own() -> None:
    program = bidirectional()
    assert [program.previous_stage(stage) for stage in range(4)] == [None, 0, None, 2]
    assert [program.next_stage(stage) for stage in range(4)] == [1, None, 3, None]
    assert [program.microbatches_of(stage) for stage in range(4)] == [range(2)] * 2 + [range(2, 3)] * 2
    assert [program.piece_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    assert program.digest() != replace(program, chains=()).digest()


def test_a_bidirectional_program_is_lowered_verified_and_simulated() -> None:
    verified = verify(lower(bidirectional()))
    assert verified.peak_activations == (3, 2)
    assert {channel for channel in verified.slots if channel.kind is Kind.F} == {
        Channel(Kind.F, 0, 1),
        Channel(Kind.F, 2, 3),
    }
    assert verified.program.compute_only() == bidirectional()
    assert simulate(bidirectional()).step_time > 0


@pytest.mark.parametrize(
    ("chains", "message"),
    [
        ([(range(2), range(3)), (range(3, 4), range(3, 3))], "the stages of the chains are"),
        ([(range(4), range(2))], r"the microbatches of the chains are range\(0, 2\)"),
        ([(range(4), range(3)), (range(4, 4), range(3, 3))], "the stages of the chains are"),
        ([(range(2), range(1, 3)), (range(2, 4), range(1))], "follow each other, and cover 0..2"),
    ],
)
def test_chains_that_leave_something_out_are_refused(chains: list[tuple[range, range]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(bidirectional(), chains=tuple(Chain(*chain) for chain in chains))
