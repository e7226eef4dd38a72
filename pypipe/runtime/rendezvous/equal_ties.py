"""Whether the parameters that are one weight, in several stages, begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pypipe.errors import ConfigurationError

__all__ = ["Tied", "compare_ties"]


class Tied(NamedTuple):
    """A parameter with a key, under one of its names.

    Attributes:
        key: what it was tied as.
        piece: the piece of the model that it is in.
        name: its name there.
        like: shape, dtype, requires_grad and placements, in words.
        values: a digest of its values.
    """

    key: str
    piece: int
    name: str
    like: str
    values: str


def compare_ties(ties: Sequence[Sequence[Tied]], *, copies: int) -> None:
    """Compares the tied parameters of all ranks.

    Args:
        ties: by rank.
        copies: how many copies of the model the pipeline holds.

    Raises:
        ConfigurationError: two of a key are not alike, or a key has only one.
    """
    first: dict[str, tuple[int, Tied]] = {}
    names: dict[str, set[tuple[int, str]]] = {}
    held: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for rank, listed in enumerate(ties):
        for tied in listed:
            other, theirs = first.setdefault(tied.key, (rank, tied))
            names.setdefault(tied.key, set()).add((tied.piece, tied.name))
            held.setdefault((tied.piece, tied.name), []).append((rank, tied.key))
            where = (
                f"tie {tied.key!r}: {theirs.name} of stage {theirs.piece} (rank {other}) and {tied.name} of stage "
                f"{tied.piece} (rank {rank})"
            )
            if tied.like != theirs.like:
                raise ConfigurationError(f"{where} cannot be one weight: {theirs.like} and {tied.like}")
            if tied.values != theirs.values:
                raise ConfigurationError(
                    f"{where} begin with different values: copy the one into the other, or load the same state into "
                    "both, before the first step"
                )
    for key, places in sorted(names.items()):
        if len(places) == 1:
            ((piece, name),) = places
            raise ConfigurationError(
                f"tie {key!r}: only {name} of stage {piece} has this key: call tie() for the other stages' parameters "
                "too, on their ranks, with the same key. A parameter that was made anew since (deepcopy, to_empty, "
                "fully_shard) has to be tied again"
            )
    for (piece, name), holders in sorted(held.items()):
        if len(holders) != copies or len({key for _, key in holders}) > 1:
            shown = ", ".join(f"rank {rank}: {key!r}" for rank, key in holders)
            raise ConfigurationError(
                f"{name} of stage {piece} is tied in one of the model's {copies} copies only, or with different keys "
                f"({shown}): call tie() for it in every copy, with the same key"
            )
