"""What ranks do when a call has more microbatches than the slots of their channels serve.

They close their connection and meet anew, with more slots. Which slots there are is the same on every rank, so all of
them do it in the same call, if they were given the same number of microbatches. If they were not, a rank that goes on
with the old connection finds that others have left it. Before they left, they wrote down why.
"""

from __future__ import annotations

import contextlib
import json

from pypipe.runtime.rendezvous.world import World

__all__ = ["announce", "find"]


def announce(world: World, prefix: str, call: int, n_microbatches: int) -> None:
    """Writes down, before this rank leaves a connection, with which call it does.

    Args:
        world: the ranks.
        prefix: of the connection's keys in the store.
        call: how many calls have begun, with this one.
        n_microbatches: M of the call.
    """
    if world.store is not None:
        note = {"rank": world.rank, "call": call, "n_microbatches": n_microbatches}
        world.publish(f"{prefix}/resized", json.dumps(note))


def find(world: World, prefix: str, call: int, n_microbatches: int) -> str | None:
    """Why another rank has left the connection, in words, where it did so in this call with another M; else None.

    Args:
        world, prefix, call, n_microbatches: as above, of this rank.
    """
    if world.store is None:
        return None
    with contextlib.suppress(Exception):  # a store that is gone knows nothing
        key = f"{prefix}/resized"
        if world.store.check([key]):
            note = json.loads(world.store.get(key))
            if note["call"] == call and note["n_microbatches"] != n_microbatches:
                return (
                    f"rank {note['rank']} cuts its batch into {note['n_microbatches']} microbatches, this rank into "
                    f"{n_microbatches}; give every rank the same n_microbatches, or as many microbatches"
                )
    return None
