"""Ranks on different hosts; also the script that they run in network namespaces of their own."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transparency
from c10d_cases import build, counted, error_of

from pypipe.runtime.rendezvous.handshake import Listener

EXCHANGE = "pypipe.runtime.rendezvous.exchange"  # where the ranks' addresses are made


def address_that_is_not_ours(rank: int, size: int, group: Any) -> str:
    """PYPIPE_ADDRESS on rank 0 names no address of this host."""
    address = {"PYPIPE_ADDRESS": "192.0.2.77"} if rank == 0 else {}
    with patch(f"{EXCHANGE}.host_identity", lambda: f"host {rank}"), patch.dict(os.environ, address):
        schedule, x, y = build(rank, size, group, 20.0)
        text = error_of(lambda: schedule.step(x, target=y))
        schedule.close()
    return text


def on_two_hosts(rank: int, size: int, group: Any) -> list[str]:
    """Ranks that believe to be on hosts of their own meet over TCP, and use c10d by themselves."""
    addresses: list[Any] = []

    class Noted(Listener):
        def __init__(self, me: int, address: str) -> None:
            super().__init__(me, address)
            addresses.append(self.address)

    with (
        patch(f"{EXCHANGE}.host_identity", lambda: f"host {rank // 2}"),
        patch(f"{EXCHANGE}.Listener", Noted),
        patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1"}),
        counted() as traffic,
    ):
        found = transparency.compare(rank, size, group, "Schedule1F1B", "mixed", 3, 7, True)
    crosses = rank in (1, 2)
    if bool(traffic.sent) != crosses:
        found.append(f"rank {rank} sent {traffic.sent} messages over c10d")
    kinds = sorted({type(address).__name__ for address in addresses})
    # Rank 0 also listens for the last rank: the control sockets form a ring.
    expected = {0: ["str", "tuple"], 1: ["tuple"], 2: ["str"], 3: []}[rank]
    if kinds != expected:
        found.append(f"rank {rank} listened at {addresses}")
    found += [f"rank {rank} listened at {a}" for a in addresses if not isinstance(a, str) and a[0] != "127.0.0.1"]
    return found


def _table() -> dict[str, tuple[str, str]]:
    """TCP sockets of this network namespace: inode -> local address and state."""
    found = {}
    with open("/proc/net/tcp") as table:
        next(table)
        for line in table:
            fields = line.split()
            number = int(fields[1].split(":")[0], 16)
            found[fields[9]] = (".".join(str(number >> shift & 255) for shift in (0, 8, 16, 24)), fields[3])
    return found


def end_at_once() -> None:
    """Trains one step and ends, on rank 1 without waiting for rank 0, which is a little slower."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    schedule, x, y = build(rank, 2, None, 20.0)
    irecv, count = dist.irecv, 0

    def late(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:  # the last gradient
            time.sleep(0.5)
        return irecv(*args, **kwargs)

    if rank == 0:
        dist.irecv = late
    schedule.step(x, target=y)
    print("done", flush=True)


def main() -> None:
    """Trains as one rank of a job whose ranks are in different network namespaces; prints what it saw, as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    listening: list[tuple[str, str]] = []

    class Noted(Listener):
        def __init__(self, me: int, address: str) -> None:
            super().__init__(me, address)
            inode = os.readlink(f"/proc/self/fd/{self._socket.fileno()}")[len("socket:[") : -1]
            if not isinstance(self.address, str):
                listening.append(_table()[inode])

    with patch(f"{EXCHANGE}.Listener", Noted), counted() as traffic:
        found = []
        for case in json.loads(sys.argv[1]):
            found += transparency.compare(rank, size, None, *case)
    print(json.dumps({"rank": rank, "differences": found, "sent": traffic.sent, "listening": listening}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    end_at_once() if sys.argv[1] == "end_at_once" else main()
