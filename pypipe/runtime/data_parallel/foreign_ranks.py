"""Groups of replicas that have other ranks of the pipeline in them, so that different stages would be mixed up."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["foreign_ranks"]


def foreign_ranks(what: str, ranks: Iterable[int], others: frozenset[int], remedy: str, where: str = "") -> str | None:
    """Why something in a stage cannot be used with this group; None where it can.

    Args:
        what: the thing, and what it would do to different stages: "DistributedDataParallel would average the gradients
            of".
        ranks: the group's global ranks.
        others: the global ranks of this pipeline's other members.
        remedy: how to say which group it is to have.
        where: in which part of the stage's module, in brackets.
    """
    found = sorted(others.intersection(ranks))
    if not found:
        return None
    listed = ", ".join(map(str, found[:4])) + (", ..." if len(found) > 4 else "")
    return (
        f"{what} different stages{where}: its process group has other ranks of this pipeline (global "
        f"rank{'s' * (len(found) > 1)} {listed}). Give it the group of this stage's replicas: {remedy}"
    )
