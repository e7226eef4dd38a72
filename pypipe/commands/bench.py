"""`pypipe bench`: latency and bandwidth of the links between ranks, from 8 bytes to 64 MiB.

Alone it measures two processes of this machine. Under torchrun it measures every pair of the ranks it is given, one
pair at a time, and shows a matrix, in which a slow cable stands out.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from pypipe.commands.conventions import json_option, rendered
from pypipe.commands.launch import RankError, Ranks

__all__ = ["SIZES", "Figure", "Pair", "command", "measure"]

SIZES = (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
"""Bytes of a message."""

_SLOTS = 2
_TIMEOUT = 120.0
_SECONDS = 0.2  # that one figure should take, about
_ROUNDS = 5


@dataclass(frozen=True)
class Figure:
    """What was measured for messages of one size.

    Attributes:
        bytes: of a message.
        latency_us: microseconds from the call of send to the return of receive at the other end: half of the median
            round trip.
        bandwidth_gb_s: 1e9 bytes a second of back-to-back messages in one direction, the median of five rounds.
    """

    bytes: int
    latency_us: float
    bandwidth_gb_s: float


@dataclass(frozen=True)
class Pair:
    """Figures between two ranks; `link` is what carried the messages (shm or c10d)."""

    source: int
    target: int
    link: str
    figures: list[Figure]


class _End:
    """One rank's two channels to another rank."""

    def __init__(self, connection: Any, rank: int, peer: int) -> None:
        from pypipe.program import Channel, Kind

        self._sender = connection.senders[Channel(Kind.F, rank, peer)]
        self._receiver = connection.receivers[Channel(Kind.F, peer, rank)]
        self._rank, self._peer = rank, peer
        self.link: str = connection.carried_by[Channel(Kind.F, rank, peer)]
        self._sent = self._received = 0

    def ready(self, size: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Functions that send and receive one message of `size` bytes."""
        import torch

        from pypipe.program import Kind
        from pypipe.runtime.transport import trees
        from pypipe.runtime.transport.channel import Tag

        payload = torch.zeros(size, dtype=torch.uint8)
        tensors = [payload]
        layout = self._sender.announce(trees.encode(trees.describe(payload, [])), [size], 0)
        sender, receiver = self._sender, self._receiver
        kind = Kind.F.order
        mine, theirs = Tag(self._rank, kind, 0, 0, 0), Tag(self._peer, kind, 0, 0, 0)

        def send() -> None:
            sender.transfer(layout, mine, tensors)

        def receive() -> None:
            receiver.release(receiver.wait(theirs))

        return send, receive


def _round_trips(send: Callable[[], None], receive: Callable[[], None], first: bool, count: int) -> list[float]:
    """Seconds of each of `count` round trips, as seen by the end that goes first."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        if first:
            send()
            receive()
        else:
            receive()
            send()
        times.append(time.perf_counter() - start)
    return times


def _stream(send: Callable[[], None], receive: Callable[[], None], first: bool, count: int) -> float:
    """Seconds a message, for `count` messages one way and, when they are there, a last one back."""
    start = time.perf_counter()
    for _ in range(count):
        if first:
            send()
        else:
            receive()
    if first:
        receive()
    else:
        send()
    return (time.perf_counter() - start) / (count + 1)


def _measure_pair(end: _End, first: bool, sizes: Sequence[int]) -> list[Figure]:
    figures = []
    for size in sizes:
        send, receive = end.ready(size)
        # Both ends must do equally many; a guess by size keeps each figure near _SECONDS without talking about it.
        guess = 20e-6 + size / 4e9
        count = max(5, min(2000, int(_SECONDS / guess / 2)))
        _round_trips(send, receive, first, max(3, count // 10))
        trips = _round_trips(send, receive, first, count)
        rounds = [_stream(send, receive, first, count) for _ in range(_ROUNDS)]
        figures.append(Figure(size, statistics.median(trips) / 2 * 1e6, size / statistics.median(rounds) / 1e9))
    return figures


def measure(world: Any, sizes: Sequence[int] = SIZES, only: tuple[int, int] | None = None) -> list[Pair]:
    """Measures the pairs of ranks of `world`, one after the other. Every rank calls it.

    Args:
        world: the ranks, from pypipe.runtime.rendezvous.world.find_world().
        sizes: bytes of a message.
        only: measure this pair alone; the others do not take part.

    Returns:
        On rank 0 all pairs; on other ranks those that it took part in. The figures are those of the lower rank.
    """
    import torch

    from pypipe.program import Channel, Kind, Link
    from pypipe.runtime.rendezvous.config import Config
    from pypipe.runtime.transport.connection import connect

    ranks = range(world.size)
    pairs = [only] if only else [(a, b) for a in ranks for b in ranks if a < b]
    ways = [way for a, b in pairs for way in ((a, b), (b, a))]
    links = {Channel(Kind.F, a, b): Link(Kind.F, a, b) for a, b in ways}
    slots = dict.fromkeys(links, _SLOTS)
    connection = connect(
        world, torch.device("cpu"), links, lambda _: slots, Config(schedule="bench"), lambda configs: None, _TIMEOUT
    )
    prefix = f"pypipe/bench/{world.name}/{world.rendezvous()}"
    measured = []
    try:
        for number, (a, b) in enumerate(pairs):
            if world.rank in (a, b):
                end = _End(connection, world.rank, b if world.rank == a else a)
                figures = _measure_pair(end, world.rank == a, sizes)
                if world.rank == a:
                    measured.append(Pair(a, b, end.link, figures))
                    world.store.set(
                        f"{prefix}/{number}", json.dumps([asdict(figure) for figure in figures] + [end.link])
                    )
            # One pair at a time, lest they share a cable.
            *values, link = json.loads(_wait_for(world.store, f"{prefix}/{number}"))
            if world.rank == 0 and a != 0:
                measured.append(Pair(a, b, link, [Figure(**value) for value in values]))
    finally:
        connection.close()
    return measured


def _wait_for(store: Any, key: str) -> str:
    deadline = time.monotonic() + _TIMEOUT * 10
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError("another pair of ranks did not finish its measurement")
        time.sleep(0.005)
    return str(store.get(key).decode())


def _rank_main(rank: int, report: Callable[[Any], None], store_path: str) -> None:
    """One of the two processes of this machine."""
    import torch.distributed as dist

    from pypipe.runtime.rendezvous.world import World

    world = World(rank, 2, dist.FileStore(store_path, 2), None, "bench")  # type: ignore[attr-defined]
    pairs = measure(world)
    if rank == 0:
        report([asdict(pair) for pair in pairs])


def _pairs_of(values: list[dict[str, Any]]) -> list[Pair]:
    return [Pair(**{**value, "figures": [Figure(**figure) for figure in value["figures"]]}) for value in values]


@click.command("bench")
@json_option
def command(as_json: bool) -> None:
    """Measure the links between ranks: latency and bandwidth.

    Alone it measures two processes on this machine; under torchrun, every pair of the ranks it is given.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from pypipe.runtime.rendezvous.world import find_world

        world = find_world()
        size, pairs = world.size, measure(world)
        if world.rank != 0:
            return
    else:
        size, pairs = 2, _measure_two()
    if as_json:
        click.echo(json.dumps({"ranks": size, "pairs": [asdict(pair) for pair in pairs]}))
    else:
        click.echo(rendered(lambda console: console.print(*_tables(pairs, size)), width=120))


def _measure_two() -> list[Pair]:
    with tempfile.TemporaryDirectory(prefix="pypipe-bench-") as folder:
        try:
            with Ranks(_rank_main, 2, (os.path.join(folder, "store"),), Path(folder)) as ranks:
                return [pair for _, message in ranks.reports() for pair in _pairs_of(message)]
        except RankError as error:
            raise click.ClickException(f"{error}\n{error.log}".strip()) from error


def _tables(pairs: list[Pair], size: int) -> list[Table]:
    """The figures of one pair by size of message; of several, matrices of the least latency and the most bandwidth."""
    if size == 2:
        table = Table(title=f"rank 0 to rank 1, over {pairs[0].link}")
        for column in ("message", "latency, µs", "bandwidth, GB/s"):
            table.add_column(column, justify="right")
        for figure in pairs[0].figures:
            table.add_row(_readable(figure.bytes), f"{figure.latency_us:.2f}", f"{figure.bandwidth_gb_s:.3f}")
        return [table]
    tables = []
    small, large = pairs[0].figures[0].bytes, pairs[0].figures[-1].bytes
    latencies = {(pair.source, pair.target): f"{pair.figures[0].latency_us:.1f}" for pair in pairs}
    rates = {(pair.source, pair.target): f"{pair.figures[-1].bandwidth_gb_s:.2f}" for pair in pairs}
    for title, cells in (
        (f"latency of {_readable(small)}, µs", latencies),
        (f"bandwidth of {_readable(large)}, GB/s", rates),
    ):
        table = Table(title=title)
        table.add_column("rank", justify="right")
        for rank in range(size):
            table.add_column(str(rank), justify="right")
        for row in range(size):
            table.add_row(str(row), *(cells.get((min(row, c), max(row, c)), "-") for c in range(size)))
        tables.append(table)
    return tables


def _readable(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"
