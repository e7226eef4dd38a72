"""What ranks see when a peer, its bytes or the backend fail on the c10d link."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from c10d_cases import Calls, build, error_of, forced, replaced

import pypipe


def dead_peer(rank: int, size: int, group: Any) -> str:
    """The last rank dies in the middle of its second step."""
    with forced():
        steps = 0

        def perhaps_die() -> None:
            if steps == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        schedule, x, y = build(rank, size, group, 30.0, Calls(perhaps_die) if rank == size - 1 else None)
        schedule.step(x, target=y)
        steps = 1
        return error_of(lambda: schedule.step(x, target=y))


def busy_peer(rank: int, size: int, group: Any, flag: str) -> str:
    """The last rank works for longer than rank 0 is willing to wait."""

    def work() -> None:
        give_up = time.monotonic() + 20.0
        while not os.path.exists(flag) and time.monotonic() < give_up:
            time.sleep(0.01)

    dist.barrier(group=group)
    with forced():
        schedule, x, y = build(rank, size, group, 1.5 if rank == 0 else 30.0, Calls(work) if rank == size - 1 else None)
        text = error_of(lambda: schedule.step(x, target=y))
        if rank == 0:
            Path(flag).touch()
        schedule.close()
    return text


class Sent:
    """A Work that claims to be done."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def lost_bytes(rank: int, size: int, group: Any) -> str:
    """Rank 1 announces a message whose bytes never come: the backend, not the peer, hangs."""
    swallow = replaced("isend", lambda *args, **kwargs: Sent()) if rank == 1 else contextlib.nullcontext()
    dist.barrier(group=group)
    with forced(), swallow:
        schedule, x, y = build(rank, size, group, 1.5 if rank == 0 else 30.0)
        text = error_of(lambda: schedule.step(x, target=y))
        # Rank 1 has nothing to wait for, and hears of it at its next step at the latest.
        text = text or error_of(lambda: schedule.step(x, target=y))
        schedule.close()
    return text


def abort_while_bytes_are_awaited(rank: int, size: int, group: Any) -> str:
    """Rank 1 announces a message whose bytes never come, and then fails."""
    count = 0

    def fail_at_the_second() -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise pypipe.PipelineError("had enough")

    swallow = replaced("isend", lambda *args, **kwargs: Sent()) if rank == 1 else contextlib.nullcontext()
    with forced(), swallow:
        schedule, x, y = build(rank, size, group, 30.0, Calls(fail_at_the_second) if rank == 1 else None)
        text = error_of(lambda: schedule.step(x, target=y))
        schedule.close()
    return text


class _Broken:
    """A Work of a backend that has lost its connection."""

    def wait(self, *_: Any) -> bool:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1234")

    def is_completed(self) -> bool:
        return True


def broken_backend(rank: int, size: int, group: Any, name: str) -> str:
    """The backend of rank 0 fails, although the peer is well."""
    breaking = replaced(name, lambda *args, **kwargs: _Broken()) if rank == 0 else contextlib.nullcontext()
    with forced(), breaking:
        schedule, x, y = build(rank, size, group, 8.0)
        text = error_of(lambda: schedule.step(x, target=y))
        # Rank 1 may have ended its step by then, and hears of it at its next one.
        text = text or error_of(lambda: schedule.step(x, target=y))
        schedule.close()
    return text


def backend_that_raises_at_once(rank: int, size: int, group: Any) -> str:
    """isend of rank 0 itself raises."""

    def isend(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Backend nonsense does not support isend")

    with forced(), replaced("isend", isend) if rank == 0 else contextlib.nullcontext():
        schedule, x, y = build(rank, size, group, 20.0)
        text = error_of(lambda: schedule.step(x, target=y))
        schedule.close()
    return text


def group_after_a_failure(rank: int, size: int, group: Any, flag: str) -> list[str]:
    """A step fails with messages under way; the process group lives on, also beyond its own timeout."""
    mine = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=3))
    if rank > 1:
        return []
    isend, count = dist.isend, 0

    def noted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        work = isend(*args, **kwargs)
        count += 1
        if count == 2:
            Path(flag).touch()
        return work

    def fail() -> None:
        give_up = time.monotonic() + 2.0
        while not os.path.exists(flag) and time.monotonic() < give_up:  # so that the second message is under way
            time.sleep(0.001)
        raise ValueError("on purpose")

    with forced(), replaced("isend", noted):
        schedule, x, y = build(rank, 2, mine, 20.0, Calls(fail) if rank == 1 else None)
        found = [] if "on purpose" in error_of(lambda: schedule.step(x, target=y)) else ["no error"]
        schedule.close()
    try:
        for _ in range(9):
            dist.all_reduce(torch.ones(1), group=mine)
            time.sleep(0.5)
    except RuntimeError as error:
        found.append(f"rank {rank}: the process group broke: {error}")
    return found
