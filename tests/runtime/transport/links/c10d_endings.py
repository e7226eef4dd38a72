"""Ranks that close, destroy their group or end as soon as their last message is on its way over c10d."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from c10d_cases import build, error_of, forced, replaced


def peer_that_leaves_after_its_last_message(rank: int, size: int, group: Any) -> list[str]:
    """Rank 1 closes its schedule while its last gradient is still on its way to rank 0."""
    with forced():
        schedule, x, y = build(rank, size, group, 20.0)
        schedule.step(x, target=y)
        if rank == 1:
            schedule.step(x, target=y)
            schedule.close()
            return []
        hub = schedule._pipeline._running.connection.hub

        class Slow:
            def __init__(self, work: Any) -> None:
                self._work = work

            def wait(self, *arguments: Any) -> Any:
                give_up = time.monotonic() + 2.0
                with contextlib.suppress(RuntimeError):
                    while time.monotonic() < give_up:
                        hub.check(1)
                        time.sleep(0.001)
                    return self._work.wait(*arguments)
                time.sleep(0.2)  # as the bytes of a large message would take
                return self._work.wait(*arguments)

            def is_completed(self) -> bool:
                return bool(self._work.is_completed())

        irecv, count = dist.irecv, 0

        def last_is_slow(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            work = irecv(*args, **kwargs)
            return Slow(work) if count == 2 else work

        with replaced("irecv", last_is_slow):
            text = error_of(lambda: schedule.step(x, target=y))
        schedule.close()
        return [text] if text else []


def group_that_ends_after_the_last_message(rank: int, size: int, group: Any, flag: str) -> list[str]:
    """Rank 1 closes and destroys its process group right after the last step; rank 0 is a little slower."""
    mine = dist.new_group([0, 1])  # on all ranks of the pool
    if rank > 1:
        return []
    with forced():
        schedule, x, y = build(rank, 2, mine, 20.0)
        irecv, count = dist.irecv, 0

        def late(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == 2:  # the last gradient
                give_up = time.monotonic() + 1.0
                while not os.path.exists(flag) and time.monotonic() < give_up:
                    time.sleep(0.001)
            return irecv(*args, **kwargs)

        with replaced("irecv", late) if rank == 0 else contextlib.nullcontext():
            text = error_of(lambda: schedule.step(x, target=y))
        schedule.close()
        dist.destroy_process_group(mine)
        Path(flag + str(rank)).touch()
        if rank == 1:
            Path(flag).touch()
    return [f"rank {rank}: {text}"] if text else []


def threads_after_close(rank: int, size: int, group: Any) -> list[str]:
    """Threads that are there after close() and were not before."""
    with forced():
        dist.barrier(group=group)
        before = set(threading.enumerate())
        for _ in range(3):
            schedule, x, y = build(rank, size, group, 20.0)
            schedule.step(x, target=y)
            dist.barrier(group=group)
            schedule.close()
        give_up = time.monotonic() + 2.0
        while set(threading.enumerate()) - before and time.monotonic() < give_up:
            time.sleep(0.01)
        return sorted(f"rank {rank}: {thread.name}" for thread in set(threading.enumerate()) - before)
