"""Preparation: whatever a program lists of transfers, what comes out is proven; what is faulty is refused."""

from __future__ import annotations

import pytest

from pypipe.program import ProgramError, build, builder_names, loads_csv, lower, one_f_one_b, prepare, verify


@pytest.mark.parametrize("name", builder_names())
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_program_without_transfers_is_lowered_and_verified(name: str, synchronous: bool) -> None:
    program = build(name, 2, 3)
    by_hand = verify(lower(program, synchronous=synchronous), synchronous=synchronous)
    assert prepare(program, synchronous=synchronous) == by_hand


def test_a_program_with_transfers_stays_as_it_is() -> None:
    # The second RECV stands later than lowering would put it.
    text = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1RECV_F1,1F0,1B0,1F1,1SEND_B0,1B1,1SEND_B1\n"
    program = loads_csv(text)
    assert program.without_transfers() != program
    assert prepare(program).program is program
    assert lower(program.without_transfers()) != program


def test_transfers_that_would_block_are_refused() -> None:
    lowered = lower(one_f_one_b(2, 4))
    assert prepare(lowered).program is lowered
    with pytest.raises(ProgramError, match="deadlock: rank 0, position 0, 0RECV_B0 never gets to run"):
        prepare(lowered, synchronous=True)


def test_one_rank_needs_no_transfers_and_no_slots() -> None:
    verified = prepare(one_f_one_b(1, 3))
    assert verified.program.ranks == one_f_one_b(1, 3).ranks
    assert not verified.slots
