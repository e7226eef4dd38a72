"""Shows every rank of a pipeline what each of them has, through the store in which they first met."""

from __future__ import annotations

import json
import time
from typing import Any

from pypipe.errors import PipelineTimeout
from pypipe.runtime.rendezvous.exchange import read_all
from pypipe.runtime.rendezvous.world import World

__all__ = ["gather"]

_rounds: dict[str, int] = {}  # how often each set of ranks has done this; all ranks of a set count alike


def gather(world: World, what: str, value: Any, timeout: float) -> list[Any]:
    """What every rank passed here, by rank. Every rank calls it, in the same order.

    Args:
        world: the ranks.
        what: where this is, for errors.
        value: JSON.
        timeout: seconds.

    Raises:
        PeerLost: a rank's process has ended, or the store is gone.
        PipelineTimeout: a rank did not come.
    """
    if world.size == 1:
        return [value]
    number = _rounds[world.name] = _rounds.get(world.name, -1) + 1
    prefix = world.key("gather", number)
    world.store.set(f"{prefix}/{world.rank}", json.dumps(value))
    keys = {rank: f"{prefix}/{rank}" for rank in range(world.size)}
    try:
        texts = read_all(world, prefix, keys, time.monotonic() + timeout)
    except PipelineTimeout:
        absent = ", ".join(str(rank) for rank, key in keys.items() if not world.store.check([key]))
        raise PipelineTimeout(
            f"rank {world.rank} waited {timeout:g} s for rank {absent} in {what}: every rank of the pipeline makes the "
            "same calls of it, in the same order"
        ) from None
    if number:  # every rank has come to this round, so none still reads of the one before
        world.store.delete_key(world.key("gather", number - 1, world.rank))
    return [json.loads(texts[rank]) for rank in range(world.size)]
