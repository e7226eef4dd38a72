"""What every benchmark takes and prints: options, environment, medians with their spread, tables or JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import rich.console
import rich.table
import torch

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, columns, rows


def options(description: str, contenders: Sequence[str]) -> argparse.Namespace:
    """The command line that all comparisons share, checked before any process starts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which the contenders take turns (7)")
    parser.add_argument("--quick", action="store_true", help="at most two short rounds: does it run at all?")
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=contenders,
        default=contenders,
        metavar="NAME",
        help=f"which of {', '.join(contenders)} (all)",
    )
    chosen = parser.parse_args()
    if chosen.rounds < 1:
        parser.error("--rounds must be at least 1")
    if chosen.quick:
        chosen.rounds = min(chosen.rounds, 2)
    if "pypipe" in chosen.contenders and importlib.util.find_spec("pypipe") is None:
        parser.error("pypipe is not installed: run 'pip install .', or leave it out by --contenders")
    return chosen


def environment() -> dict[str, Any]:
    """The facts that a figure is worthless without."""
    try:
        pypipe = importlib.metadata.version("pypipe")
    except importlib.metadata.PackageNotFoundError:
        pypipe = None
    return {
        "pypipe": pypipe,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def summary(samples: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Median, smallest and largest of one figure over the rounds, times ``scale``."""
    samples = [sample * scale for sample in samples]
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def ratios(samples: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Summary of the quotients round by round: what disturbs a whole round cancels out."""
    return summary([sample / reference for sample, reference in zip(samples, references, strict=True)])


def spread(figure: dict[str, float], digits: int) -> str:
    """A summary as a table shows it: ``1.07 (1.05-1.12)``."""
    return f"{figure['median']:.{digits}f} ({figure['min']:.{digits}f}-{figure['max']:.{digits}f})"


def show(result: dict[str, Any], tables: Iterable[Table], as_json: bool) -> None:
    """Print ``result`` as JSON and nothing else, or its environment and ``tables``."""
    if as_json:
        json.dump(result, sys.stdout, indent=2)
        print()
        return
    print(", ".join(f"{name} {value}" for name, value in result["environment"].items()))
    # A fixed width: piped into a file, nothing is cut at 80 columns.
    console = rich.console.Console(width=120, highlight=False)
    for title, columns, rows in tables:
        table = rich.table.Table()
        for column in columns:
            table.add_column(column, justify="left" if column == columns[0] else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(f"\n{title}", table, sep="\n")
