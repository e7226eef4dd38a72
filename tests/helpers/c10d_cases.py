"""Pipelines over torch.distributed's own backend. Run as a script: one rank of a job on several (virtual) hosts."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transparency
from models import make
from torch import Tensor, nn
from torch.nn import functional

import pypipe
from pypipe.runtime import rendezvous

CPU = torch.device("cpu")


class Traffic:
    """Counts what goes through torch.distributed."""

    def __init__(self) -> None:
        self.sent = self.received = 0


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Counts isend and irecv of this process for a while."""
    traffic = Traffic()
    isend, irecv = dist.isend, dist.irecv

    def counting_isend(*args: Any, **kwargs: Any) -> Any:
        traffic.sent += 1
        return isend(*args, **kwargs)

    def counting_irecv(*args: Any, **kwargs: Any) -> Any:
        traffic.received += 1
        return irecv(*args, **kwargs)

    dist.isend, dist.irecv = counting_isend, counting_irecv
    try:
        yield traffic
    finally:
        dist.isend, dist.irecv = isend, irecv


@contextlib.contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    """Puts another function in the place of one of torch.distributed for a while."""
    before = getattr(dist, name)
    setattr(dist, name, value)
    try:
        yield
    finally:
        setattr(dist, name, before)


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """PYPIPE_LINK=c10d for a while."""
    os.environ["PYPIPE_LINK"] = "c10d"
    try:
        yield
    finally:
        del os.environ["PYPIPE_LINK"]


def compare_many(rank: int, size: int, group: Any, cases: list[tuple[str, str, int, int, bool]]) -> list[str]:
    """The transparency comparison over c10d."""
    with forced(), counted() as traffic:
        found = transparency.compare_many(rank, size, group, cases)
    if size > 1 and not (traffic.sent and traffic.received):
        found.append(f"rank {rank} sent {traffic.sent} and received {traffic.received} messages over c10d")
    return found


def asked_for_by_one_rank(rank: int, size: int, group: Any) -> list[str]:
    """PYPIPE_LINK=c10d on rank 1 alone makes all ranks use it."""
    with forced() if rank == 1 else contextlib.nullcontext(), counted() as traffic:
        found = transparency.compare(rank, size, group, "Schedule1F1B", "mlp", 2, 4, True)
    return found if traffic.sent and traffic.received else [*found, f"rank {rank} did not use c10d"]


class Calls(nn.Module):
    """Calls something at every forward."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(6, 6).double(), call

    def forward(self, x: Tensor) -> Tensor:
        self.call()
        return self.linear(x)


def _build(rank: int, size: int, group: Any, timeout: float, module: nn.Module | None = None) -> tuple[Any, Any, Any]:
    modules, make_batch, loss_fn = make("mlp", size)
    stage = pypipe.PipelineStage(module or modules[rank], rank, size, CPU, group=group)
    schedule = pypipe.Schedule1F1B(stage, 2, loss_fn, timeout=timeout)
    return schedule, *make_batch(4)


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:
        return f"not pypipe's: {type(error).__name__}: {error}"
    return ""


def dead_peer(rank: int, size: int, group: Any) -> str:
    """The last rank dies in the middle of its second step."""
    with forced():
        steps = 0

        def perhaps_die() -> None:
            if steps == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        schedule, x, y = _build(rank, size, group, 30.0, Calls(perhaps_die) if rank == size - 1 else None)
        schedule.step(x, target=y)
        steps = 1
        return _error_of(lambda: schedule.step(x, target=y))


def busy_peer(rank: int, size: int, group: Any, flag: str) -> str:
    """The last rank works for longer than rank 0 is willing to wait."""

    def work() -> None:
        give_up = time.monotonic() + 20.0
        while not os.path.exists(flag) and time.monotonic() < give_up:
            time.sleep(0.01)

    dist.barrier(group=group)
    with forced():
        schedule, x, y = _build(
            rank, size, group, 1.5 if rank == 0 else 30.0, Calls(work) if rank == size - 1 else None
        )
        text = _error_of(lambda: schedule.step(x, target=y))
        if rank == 0:
            Path(flag).touch()
        schedule.close()
    return text


class _Sent:
    """A Work that claims to be done."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def lost_bytes(rank: int, size: int, group: Any) -> str:
    """Rank 1 announces a message whose bytes never come: the backend, not the peer, hangs."""
    swallow = replaced("isend", lambda *args, **kwargs: _Sent()) if rank == 1 else contextlib.nullcontext()
    dist.barrier(group=group)
    with forced(), swallow:
        schedule, x, y = _build(rank, size, group, 1.5 if rank == 0 else 30.0)
        text = _error_of(lambda: schedule.step(x, target=y))
        # Rank 1 has nothing to wait for, and hears of it at its next step at the latest.
        text = text or _error_of(lambda: schedule.step(x, target=y))
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

    swallow = replaced("isend", lambda *args, **kwargs: _Sent()) if rank == 1 else contextlib.nullcontext()
    with forced(), swallow:
        schedule, x, y = _build(rank, size, group, 30.0, Calls(fail_at_the_second) if rank == 1 else None)
        text = _error_of(lambda: schedule.step(x, target=y))
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
        schedule, x, y = _build(rank, size, group, 8.0)
        text = _error_of(lambda: schedule.step(x, target=y))
        # Rank 1 may have ended its step by then, and hears of it at its next one.
        text = text or _error_of(lambda: schedule.step(x, target=y))
        schedule.close()
    return text


def backend_that_raises_at_once(rank: int, size: int, group: Any) -> str:
    """isend of rank 0 itself raises."""

    def isend(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Backend nonsense does not support isend")

    with forced(), replaced("isend", isend) if rank == 0 else contextlib.nullcontext():
        schedule, x, y = _build(rank, size, group, 20.0)
        text = _error_of(lambda: schedule.step(x, target=y))
        schedule.close()
    return text


def peer_that_leaves_after_its_last_message(rank: int, size: int, group: Any) -> list[str]:
    """Rank 1 closes its schedule while its last gradient is still on its way to rank 0."""
    with forced():
        schedule, x, y = _build(rank, size, group, 20.0)
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
            text = _error_of(lambda: schedule.step(x, target=y))
        schedule.close()
        return [text] if text else []


def group_that_ends_after_the_last_message(rank: int, size: int, group: Any, flag: str) -> list[str]:
    """Rank 1 closes and destroys its process group right after the last step; rank 0 is a little slower."""
    mine = dist.new_group([0, 1])  # on all ranks of the pool
    if rank > 1:
        return []
    with forced():
        schedule, x, y = _build(rank, 2, mine, 20.0)
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
            text = _error_of(lambda: schedule.step(x, target=y))
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
            schedule, x, y = _build(rank, size, group, 20.0)
            schedule.step(x, target=y)
            dist.barrier(group=group)
            schedule.close()
        give_up = time.monotonic() + 2.0
        while set(threading.enumerate()) - before and time.monotonic() < give_up:
            time.sleep(0.01)
        return sorted(f"rank {rank}: {thread.name}" for thread in set(threading.enumerate()) - before)


def another_layout_per_message(rank: int, size: int, group: Any) -> list[str]:
    """Batches of other lengths at every step: buffers grow while messages are under way."""
    found = []
    with forced(), counted():
        for rows in (2, 9, 3, 200, 5):
            found += transparency.compare(rank, size, group, "Schedule1F1B", "gpt", 2, rows, True)
    return found


def no_process_group(rank: int, size: int, group: Any) -> str:
    """c10d is asked for where there is no process group."""
    world_store = dist.distributed_c10d._get_default_store()
    stage = pypipe.PipelineStage(make("mlp", size)[0][rank], rank, size, CPU, group=group)
    object.__setattr__(stage.world, "group", None)
    assert world_store is not None
    with forced():
        schedule = pypipe.ScheduleGPipe(stage, 2, functional.mse_loss, timeout=10.0)
        x = torch.randn(4, 6, dtype=torch.float64)
        text = _error_of(lambda: schedule.step(x, target=x))
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
        schedule, x, y = _build(rank, 2, mine, 20.0, Calls(fail) if rank == 1 else None)
        found = [] if "on purpose" in _error_of(lambda: schedule.step(x, target=y)) else ["no error"]
        schedule.close()
    try:
        for _ in range(9):
            dist.all_reduce(torch.ones(1), group=mine)
            time.sleep(0.5)
    except RuntimeError as error:
        found.append(f"rank {rank}: the process group broke: {error}")
    return found


def address_that_is_not_ours(rank: int, size: int, group: Any) -> str:
    """PYPIPE_ADDRESS on rank 0 names no address of this host."""
    identity = rendezvous.host_identity
    rendezvous.host_identity = lambda: f"host {rank}"
    if rank == 0:
        os.environ["PYPIPE_ADDRESS"] = "192.0.2.77"
    try:
        schedule, x, y = _build(rank, size, group, 20.0)
        text = _error_of(lambda: schedule.step(x, target=y))
        schedule.close()
    finally:
        rendezvous.host_identity = identity
        os.environ.pop("PYPIPE_ADDRESS", None)
    return text


def on_two_hosts(rank: int, size: int, group: Any) -> list[str]:
    """Ranks that believe to be on hosts of their own meet over TCP, and use c10d by themselves."""
    addresses: list[Any] = []

    class Noted(rendezvous.Listener):
        def __init__(self, me: int, address: str) -> None:
            super().__init__(me, address)
            addresses.append(self.address)

    identity, listener = rendezvous.host_identity, rendezvous.Listener
    rendezvous.host_identity = lambda: f"host {rank // 2}"
    rendezvous.Listener = Noted  # type: ignore[misc]
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        with counted() as traffic:
            found = transparency.compare(rank, size, group, "Schedule1F1B", "mixed", 3, 7, True)
    finally:
        rendezvous.host_identity, rendezvous.Listener = identity, listener  # type: ignore[misc]
        del os.environ["MASTER_ADDR"]
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
    schedule, x, y = _build(rank, 2, None, 20.0)
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

    class Noted(rendezvous.Listener):
        def __init__(self, me: int, address: str) -> None:
            super().__init__(me, address)
            inode = os.readlink(f"/proc/self/fd/{self._socket.fileno()}")[len("socket:[") : -1]
            if not isinstance(self.address, str):
                listening.append(_table()[inode])

    rendezvous.Listener = Noted  # type: ignore[misc]
    with counted() as traffic:
        found = []
        for case in json.loads(sys.argv[1]):
            found += transparency.compare(rank, size, None, *case)
    print(json.dumps({"rank": rank, "differences": found, "sent": traffic.sent, "listening": listening}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    end_at_once() if sys.argv[1] == "end_at_once" else main()
