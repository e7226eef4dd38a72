"""Slots: one more than messages are in use at once, within what can use it, for all that one pipeline runs."""

from __future__ import annotations

import pytest

from pypipe.program import Channel, Kind, build, builder_names, copy_channels, count_slots, gpipe, one_f_one_b, prepare


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("n_microbatches", [1, 2, 4, 9])
def test_1f1b_gets_one_forward_slot_more_than_it_keeps_activations(n_ranks: int, n_microbatches: int) -> None:
    slots = count_slots([prepare(one_f_one_b(n_ranks, n_microbatches))])
    assert slots == {
        **{Channel(Kind.F, r - 1, r): min(n_microbatches, n_ranks - r + 1) for r in range(1, n_ranks)},
        **{Channel(Kind.B, r + 1, r): 2 for r in range(n_ranks - 1)},
    }


@pytest.mark.parametrize("name", builder_names())
def test_training_and_evaluation_share_slots_that_are_enough_for_both(name: str) -> None:
    program = build(name, 4, 6)
    both = [prepare(program.forward_only()), prepare(program)]
    together, apart = count_slots(both), [count_slots([each]) for each in both]
    assert together == {channel: max(each.get(channel, 0) for each in apart) for channel in together}
    for each in both:
        assert all(together[channel] >= needed for channel, needed in each.slots.items())
    for channel, count in together.items():
        if channel.kind is Kind.F:
            assert count <= len(program.microbatches_of(channel.target_stage))


def test_evaluation_alone_gets_no_gradient_slots() -> None:
    slots = count_slots([prepare(gpipe(3, 4).forward_only())])
    assert slots == {Channel(Kind.F, 0, 1): 2, Channel(Kind.F, 1, 2): 2}
    assert count_slots([]) == {}


def test_two_copies_of_the_model_have_channels_of_their_own_in_both_directions() -> None:
    program = build("dualpipe", 4, 8)
    # Piece k is stage k on rank k and stage 4 + k on rank 3 - k.
    pairs = [(k, 4 + k) for k in range(4)]
    expected = [Channel(Kind.W, *ends) for a, b in pairs for ends in ((a, b), (b, a))]
    assert copy_channels(program) == expected
    slots = count_slots([prepare(program.forward_only()), prepare(program)])
    assert {channel: count for channel, count in slots.items() if channel.kind is Kind.W} == dict.fromkeys(expected, 2)
    assert copy_channels(build("dualpipev", 4, 8)) == []
