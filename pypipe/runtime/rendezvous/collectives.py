"""Gathers a few numbers of all ranks of a pipeline, between steps, so that every rank decides by the same ones.

Through the store, not through a collective of torch's: a rank that has waited in one for a peer that does not come
cannot take its part back, and the group's next collective would get it. Here each gathering has keys of its own.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from pypipe.errors import MismatchError
from pypipe.runtime.rendezvous.exchange import public_store_errors
from pypipe.runtime.rendezvous.world import World

__all__ = ["Gatherer"]

_FIRST_POLL_SECONDS = 0.0001
_LONGEST_POLL_SECONDS = 0.01


class Gatherer:
    """One rank's part in the gatherings of a pipeline.

    Args:
        world: the ranks.
        prefix: of the pipeline's keys in the store.
    """

    def __init__(self, world: World, prefix: str) -> None:
        self._world = world
        self._prefix = f"{prefix}/gather"
        self._count = 0

    @public_store_errors()
    def gather(
        self, what: str, values: list[float | str], check: Callable[[Callable[[], list[int]]], None]
    ) -> list[list[float | str]]:
        """Every rank's values, by rank; a float comes over exactly.

        Args:
            what: the call, as the user knows it; the ranks' must be the same.
            values: this rank's, as JSON values.
            check: called again and again while ranks are missing, with what tells which; raises what ends the wait.

        Raises:
            MismatchError: the ranks are in different calls; the same on every rank.
            PeerLost: the store is gone.
        """
        world = self._world
        if world.size == 1:
            return [values]
        number, self._count = self._count, self._count + 1
        keys = [f"{self._prefix}/{number}/{rank}" for rank in range(world.size)]
        world.publish(keys[world.rank], json.dumps([what, values]))

        def absent() -> list[int]:
            return [rank for rank, key in enumerate(keys) if not world.store.check([key])]

        pause = _FIRST_POLL_SECONDS
        while not world.store.check(keys):
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
            if pause == _LONGEST_POLL_SECONDS:
                check(absent)
        found: list[list[Any]] = [json.loads(world.store.get(key)) for key in keys]
        if number:
            # All ranks have come to this one, so all have read the last.
            with contextlib.suppress(Exception):  # a store that cannot forget keeps it
                world.retract(f"{self._prefix}/{number - 1}/{world.rank}")
        if any(call != what for call, _ in found):
            listed = "; ".join(f"rank {rank}: {call}" for rank, (call, _) in enumerate(found))
            raise MismatchError(
                f"rank {world.rank}: the ranks of the pipeline are in different calls ({listed}): every rank makes the "
                "same calls in the same order, also one whose stages have no parameters or no gradients"
            )
        return [numbers for _, numbers in found]
