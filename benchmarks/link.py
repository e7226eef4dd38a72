"""The link between two processes of one host, beside gloo, a bare ping-pong on shared memory, and a bare memcpy.

All four take turns in one run; medians over the rounds. Latency is one way, from Python for pypipe and gloo, from C++
for the bare ones. `python benchmarks/link.py [--json] [--rounds N] [--quick] [--contenders ...]`
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from ranks import run_ranks

from pypipe.commands.bench import SIZES, measure
from pypipe.runtime.rendezvous.world import World

CONTENDERS = ("pypipe", "gloo")


def gloo(rank: int, sizes: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """Microseconds one way, and GB/s, for each size; ping-pong and back-to-back sends as for pypipe."""
    peer, figures = 1 - rank, {}
    for size in sizes:
        tensor = torch.zeros(size, dtype=torch.uint8)
        count = max(3, min(200, int(0.1 / (150e-6 + size / 2e9))))

        def send(message: torch.Tensor = tensor) -> None:
            dist.send(message, peer)

        def receive(message: torch.Tensor = tensor) -> None:
            dist.recv(message, peer)

        times = []
        for _ in range(count):
            start = time.perf_counter()
            (send, receive)[rank]()
            (receive, send)[rank]()
            times.append((time.perf_counter() - start) / 2 * 1e6)
        start = time.perf_counter()
        for _ in range(count):
            (send, receive)[rank]()
        (receive, send)[rank]()
        figures[size] = (statistics.median(times), size * (count + 1) / (time.perf_counter() - start) / 1e9)
    return figures


def pypipe(rank: int, sizes: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """The same for pypipe's link."""
    store = dist.distributed_c10d._get_default_store()
    pairs = measure(World(rank, 2, store, None, "bench"), sizes)
    return {f.bytes: (f.latency_us, f.bandwidth_gb_s) for pair in pairs for f in pair.figures}


def turn(rank: int, size: int, contender: str, sizes: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """One contender's turn."""
    return {"pypipe": pypipe, "gloo": gloo}[contender](rank, sizes)


def build(folder: str) -> str:
    """Compiles the bare programs."""
    program = os.path.join(folder, "bare")
    source = Path(__file__).with_name("bare.cpp")
    subprocess.run([os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-o", program, str(source)], check=True)
    return program


def bare(program: str, *arguments: object) -> float:
    """One figure of a bare program."""
    output = subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True, timeout=300)
    return float(output.stdout)


def main() -> None:
    """Measures and prints."""
    chosen = report.options(__doc__.splitlines()[0], CONTENDERS)
    sizes = SIZES if not chosen.quick else (8, 4 << 20)
    spins, futexes = [], []
    copied: dict[int, list[float]] = {size: [] for size in sizes}
    latency: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in chosen.contenders}
    bandwidth: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in chosen.contenders}
    with tempfile.TemporaryDirectory(prefix="pypipe-bench-") as folder:
        program = build(folder)
        for _ in range(chosen.rounds):
            spins.append(bare(program, "pingpong", "spin", 20000))
            futexes.append(bare(program, "pingpong", "futex", 20000))
            for size in sizes:
                copied[size].append(bare(program, "memcpy", size, max(5, min(20000, int(4e8 / size)))))
            for name in chosen.contenders:
                figures = run_ranks(turn, 2, name, sizes)[0]
                for size, (microseconds, rate) in figures.items():
                    latency[name][size].append(microseconds)
                    bandwidth[name][size].append(rate)
    result: dict[str, Any] = {
        "environment": report.environment(),
        "bare_spin_us": report.summary(spins),
        "bare_futex_us": report.summary(futexes),
        "sizes": [
            {
                "bytes": size,
                "memcpy_gb_s": report.summary(copied[size]),
                **{f"{name}_latency_us": report.summary(latency[name][size]) for name in chosen.contenders},
                **{f"{name}_gb_s": report.summary(bandwidth[name][size]) for name in chosen.contenders},
                **{
                    f"{name}_over_memcpy": report.ratios(bandwidth[name][size], copied[size])
                    for name in chosen.contenders
                },
            }
            for size in sizes
        ],
    }
    names = list(chosen.contenders)
    latencies = [
        [f"{row['bytes']}", *(report.spread(row[f"{name}_latency_us"], 2) for name in names)] for row in result["sizes"]
    ]
    rates = [
        [
            f"{row['bytes']}",
            *(report.spread(row[f"{name}_gb_s"], 3) for name in names),
            report.spread(row["memcpy_gb_s"], 2),
            *(report.spread(row[f"{name}_over_memcpy"], 2) for name in names),
        ]
        for row in result["sizes"]
    ]
    floor = (
        f"one way; bare ping-pong from C++: spinning {report.spread(result['bare_spin_us'], 2)}, "
        f"futex {report.spread(result['bare_futex_us'], 2)}"
    )
    report.show(
        result,
        [
            (f"Latency, µs, {floor}", ["bytes", *names], latencies),
            (
                "Bandwidth, GB/s",
                ["bytes", *names, "memcpy", *(f"{name} / memcpy" for name in names)],
                rates,
            ),
        ],
        chosen.json,
    )


if __name__ == "__main__":
    main()
