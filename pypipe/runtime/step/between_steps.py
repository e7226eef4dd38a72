"""How a rank waits, between steps, for what the others say."""

from __future__ import annotations

import time
from collections.abc import Callable

from pypipe.errors import PeerLost
from pypipe.runtime.diagnostics import failure, status_table
from pypipe.runtime.rendezvous.collectives import Gatherer
from pypipe.runtime.step.settings import Settings
from pypipe.runtime.transport.connection import Connection

__all__ = ["gather", "report"]


def gather(
    what: str,
    values: list[float | str],
    *,
    settings: Settings,
    connection: Connection,
    gatherer: Gatherer,
    calls: int,
    raise_failure: Callable[[], None],
) -> list[list[float | str]]:
    """Every rank's values, by rank.

    Args:
        what: the call, as the user knows it; the other ranks' must be the same.
        values: this rank's, as JSON values.
        settings, connection, gatherer: the rank's.
        calls: how many calls of step() and eval() this rank has begun: tells a rank that is a step behind.
        raise_failure: raises what has gone wrong on any rank.

    Raises:
        PipelineError: another rank failed, left, makes another call or none.
    """
    where, hub, size = f"{settings.where}: {what}", connection.hub, settings.world.size
    deadline = time.monotonic() + settings.timeout

    def check(absent: Callable[[], list[int]]) -> None:
        nonlocal deadline
        raise_failure()
        gone = sorted(set(hub.departed()).intersection(absent()))  # in this order: one that came may have left since
        if gone:
            raise PeerLost(
                f"{where}: rank {gone[0]} closed its schedule, or came to the end of its script, without this call: "
                "every rank makes it, also one whose stages have no parameters"
            )
        if time.monotonic() < deadline or not (missing := absent()):
            return
        known = status_table.survey(hub, size)
        if any(known[rank].status.busy is not None for rank in missing if rank in known):
            deadline = time.monotonic() + settings.timeout
            return
        listed = ", ".join(map(str, missing))
        problem = (
            f"it waited {settings.timeout:g} s for rank{'s' * (len(missing) > 1)} {listed}: every rank makes this call "
            "after the same step(), also one whose stages have no parameters."
        )
        raise failure.timed_out(where, problem, hub, settings.world.rank, size, settings.program, calls)

    number = f"{what} after {calls} call{'s' * (calls != 1)} of step() and eval()"
    return gatherer.gather(number, values, check)


def report(error: Exception, what: str, connection: Connection, rank: int) -> None:
    """Tells the other ranks why this one cannot go on; those that are in a step still end it."""
    begun = connection.recorder.core.status().step
    failure.report(connection.hub, rank, None, error, what, step=begun + 1)
