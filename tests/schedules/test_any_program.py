"""One executor runs whatever the verifier accepts: any placement, any order, backwards whole or split."""

from __future__ import annotations

import any_program_cases
import pytest
import transparency
from rank_pool import RankPool

from pypipe.program import builder_names

# Whatever is registered is measured here: a new builder needs no line.
NAMES = [
    *builder_names(),
    *(f"{name} v=2" for name in transparency.LOOPED),
    *(f"random s=7 seed={seed}" for seed in range(4)),
]


@pytest.mark.parametrize("name", NAMES)
def test_received_messages_alive_at_most_are_as_many_as_the_program_says(ranks: RankPool, name: str) -> None:
    for rank, seen in enumerate(ranks.run(4, any_program_cases.alive, name, 9)):
        assert seen
        for channel, (measured, expected, spare) in seen.items():
            assert measured == expected, f"rank {rank}, {channel}: {measured} alive, but {expected} by the program"
            assert spare in (0, 1), f"rank {rank}, {channel}: {spare} slots more than the verifier says"


def test_stages_of_one_rank_free_what_they_hand_over_as_soon_as_autograd_lets_them(ranks: RankPool) -> None:
    for split in (False, True):
        (found,) = ranks.run(1, any_program_cases.handed_over, split)
        assert not found, found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_program_that_the_verifier_accepts_trains_as_the_unpipelined_model(ranks: RankPool, size: int) -> None:
    models = ["mlp", "mixed", "identities", "gpt"]
    cases = []
    for seed in range(7):
        n_microbatches = [4, 1, 5, 2, 7, 3, 6][seed]
        name = f"random s={size + [2, 1, 3, 0][seed % 4]} seed={seed}"
        cases.append((name, models[seed % 4], n_microbatches, 2 * n_microbatches + seed % 2, True))
    found = [text for texts in ranks.run(size, transparency.compare_many, cases) for text in texts]
    assert not found, "\n".join(found)


def test_schedules_of_several_stages_live_side_by_side(ranks: RankPool) -> None:
    found = [text for texts in ranks.run(2, any_program_cases.several_at_once) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("piece", "in_backward", "action"), [(3, False, "3F1"), (3, True, "3I1"), (0, True, "0I1")])
def test_what_one_of_several_stages_raises_is_told_to_every_rank_with_its_stage(
    ranks: RankPool, piece: int, in_backward: bool, action: str
) -> None:
    everyone = ranks.run(2, any_program_cases.fails, piece, in_backward)
    for rank, (raised, again) in enumerate(everyone):
        assert raised.startswith("ZeroDivisionError" if rank == 0 else "RemoteStageError"), raised
        for word in ("out of luck", "rank 0", f"{action} (stage {piece},", "microbatch 1"):
            assert word in raised, (word, raised)
        assert "out of luck" in again, again
