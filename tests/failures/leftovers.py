"""What a process holds of the system, and what it holds too much."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from pathlib import Path


def held() -> Counter[str]:
    """Descriptors by what they are, mappings of shared memory, threads by name, and children."""
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this very listing
            target = os.readlink(f"/proc/self/fd/{entry}")
            if not target.startswith("/proc/"):
                found["descriptor " + re.sub(r"\[\d+\]|:\d+|\d+", "", target)] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.split(maxsplit=5)[-1]
        if "memfd:" in name or "/dev/shm/" in name:
            found["mapping " + name.split()[0]] += 1
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            folder = Path("/proc/self/task", task)
            found["thread " + (folder / "comm").read_text().strip()] += 1
            found["child"] += len((folder / "children").read_text().split())
    return found


def left(before: Counter[str], *, seconds: float = 5.0, without: tuple[str, ...] = ()) -> str:
    """What there is more of than before; things that are about to end get some time for it."""
    deadline = time.monotonic() + seconds
    while True:
        more = {what: count for what, count in (held() - before).items() if not what.startswith(without)}
        if not more or time.monotonic() >= deadline:
            return ", ".join(f"{count} x {what}" for what, count in sorted(more.items()))
        time.sleep(0.01)
