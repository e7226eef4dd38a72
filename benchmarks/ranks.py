"""Rank processes for the benchmarks: started together, listened to under one deadline, never left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

import torch
import torch.distributed as dist

context: SpawnContext = multiprocessing.get_context("spawn")


class RankError(RuntimeError):
    """A rank raised, died or stayed silent until the deadline."""


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 600.0) -> list[Any]:
    """Call ``function(rank, world_size, *arguments)`` in one new process per rank, in one gloo process group.

    Returns what each rank returned, in rank order. Raises RankError at the first rank that raises or dies, or
    after ``timeout`` seconds; every process is gone when this returns or raises, Ctrl-C included.
    """
    # Loopback: all ranks are on this host, and its name may resolve to nothing that gloo can bind.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; read when a child imports torch
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    processes: list[SpawnProcess] = []
    connections: dict[Connection, int] = {}
    try:
        for rank in range(world_size):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(sending, store.port, timeout, function, rank, world_size, *arguments),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            sending.close()  # so that the child holds the only end, and its death reads as end-of-file
            processes.append(process)
            connections[receiving] = rank
        results = _collect(connections, time.monotonic() + timeout)
        for process in processes:
            process.join(timeout=5)
        return results
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join(timeout=10)


def _collect(connections: dict[Connection, int], deadline: float) -> list[Any]:
    """Each rank's result, in rank order."""
    results: dict[int, Any] = {}
    while connections:
        ready = wait(list(connections), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"no result from ranks {sorted(connections.values())} before the deadline")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections[connection]
            try:
                succeeded, value = connection.recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not succeeded:
                raise RankError(f"rank {rank} raised:\n{value}")
            results[rank] = value
            del connections[connection]
            connection.close()
    return [results[rank] for rank in sorted(results)]


def _rank_main(
    sending: Connection,
    port: int,
    timeout: float,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    *arguments: Any,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends the ranks
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = function(rank, world_size, *arguments)
        dist.barrier()  # nobody closes sockets that a slower rank is still using
        dist.destroy_process_group()
        sending.send((True, result))
    except BaseException:
        sending.send((False, traceback.format_exc()))
        raise SystemExit(1) from None


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


Span = tuple[float, float]  # seconds on the host's monotonic clock, so that ranks' readings compare


def take_turns(steps: Mapping[str, Callable[[], object]], rounds: int, count: int) -> Iterator[tuple[str, Span]]:
    """Yield, as each contender's turn of ``count`` steps is done, its name and this rank's span of it.

    All ranks start a turn together. The order rotates from round to round, so that each contender starts
    some.
    """
    names = list(steps)
    for number in range(rounds):
        for position in range(len(names)):
            name = names[(number + position) % len(names)]
            step = steps[name]
            dist.barrier()
            start = time.monotonic()
            for _ in range(count):
                step()
            yield name, (start, time.monotonic())


def elapsed(spans: Iterable[Span]) -> float:
    """Seconds from the first rank's start to the last rank's end."""
    starts, ends = zip(*spans, strict=True)
    return float(max(ends) - min(starts))
