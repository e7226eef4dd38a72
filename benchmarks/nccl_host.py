"""The host's share of one send and one receive over the NCCL link, on the emulator: it says nothing of a GPU's speed.

    python benchmarks/nccl_host.py [--json] [--messages N] [--instructions]

Two processes. One sends, and the other receives when all has arrived, so that no call waits. Nanoseconds are those of
the whole call, with the emulator's part in it. With --instructions both run under valgrind's callgrind, for two
numbers of messages, and the difference is counted by library: the core (`_core`, also its control thread), Python, the
emulator, the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BATCH = 4
BYTES = 4096


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--instructions", action="store_true", help="count instructions too (valgrind; minutes)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        print(json.dumps(_rank(chosen.rank, chosen.store, chosen.messages)))
        return 0
    result: dict[str, Any] = {"bytes": BYTES, "load_average": round(os.getloadavg()[0], 2)}
    result["ns"] = {name: value for said in _run(chosen.messages, None) for name, value in said.items()}
    if chosen.instructions:
        result["instructions"] = _instructions()
    if chosen.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"{BYTES} bytes, load average {result['load_average']}; medians, emulator included")
    for name, value in result["ns"].items():
        print(f"  {name:8} {value:8.0f} ns")
    for end, counted in result.get("instructions", {}).items():
        print(f"instructions of the {end}, per message: {counted}")
    return 0


def _run(messages: int, folder: Path | None) -> list[dict[str, float]]:
    sys.path.insert(0, str(HERE.parent / "tests" / "emulator"))
    import cuda_emulator

    emulator = cuda_emulator.build()
    environment = os.environ | {
        "PYPIPE_CUDA_LIBRARY": str(emulator.cuda),
        "PYPIPE_NCCL_LIBRARY": str(emulator.nccl),
        "PYPIPE_LINK": "nccl",
        "PYPIPE_EMULATOR_DELAY_US": "0",
        "PYPIPE_EMULATOR_IN_PROGRESS": "0",
        "PYPIPE_EMULATOR_LAZY": "0",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as meeting:
        processes = []
        for rank in range(2):
            command = [sys.executable, __file__, "--rank", str(rank), "--store", meeting, "--messages", str(messages)]
            if folder is not None:
                # Only what runs between start and end of the measured loop differs between two numbers of messages.
                command = [
                    *("valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/{rank}.{messages}"),
                    *command,
                ]
            processes.append(
                subprocess.Popen(
                    command, env=environment, cwd=meeting, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        said = []
        for process in processes:
            output, errors = process.communicate(timeout=900)
            if process.returncode != 0:
                raise RuntimeError(errors[-2000:])
            said.append(json.loads(output.splitlines()[-1]))
        return said


def _rank(rank: int, folder: str, messages: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from pypipe.program import Channel, Kind, Link
    from pypipe.runtime.channels import Tag
    from pypipe.runtime.connection import Connection
    from pypipe.runtime.world import find_world

    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    forward, backward = Channel(Kind.F, 0, 1), Channel(Kind.B, 1, 0)
    links = {forward: Link(Kind.F, 0, 1), backward: Link(Kind.B, 1, 0)}
    connection = Connection(
        find_world(), torch.device("cpu"), links, {forward: BATCH, backward: 1}, {}, lambda cards: None, 600.0
    )
    there, back = Tag(0, ord("F"), 0, 1, 1), Tag(1, ord("B"), 0, 1, 1)
    tensor = torch.zeros(BYTES, dtype=torch.uint8)
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Any, *args: Any) -> Any:
        start = time.perf_counter_ns()
        result = call(*args)
        times.setdefault(name, []).append(time.perf_counter_ns() - start)
        return result

    if rank == 0:
        sender, receiver = connection.senders[forward].port, connection.receivers[backward].port
        layout = sender.announce("{}", [BYTES], 0)
        for _ in range(messages // BATCH):
            for _ in range(BATCH):
                timed("send", sender.send, layout, there, [tensor])
            receiver.release(receiver.receive(back))
    else:
        sender, receiver = connection.senders[backward].port, connection.receivers[forward].port
        layout = sender.announce("{}", [BYTES], 0)
        for _ in range(messages // BATCH):
            time.sleep(0.002)  # until all has been announced
            timed("post", receiver.post)
            time.sleep(0.002)  # until all has arrived
            for _ in range(BATCH):
                message = timed("receive", receiver.receive, there)
                timed("release", receiver.release, message)
            sender.send(layout, back, [tensor])
    connection.close()
    dist.destroy_process_group()
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    if "post" in medians:
        medians["post"] /= BATCH
    return medians


_OBJECTS = {
    "core": r"_core\.cpython",
    "Python": r"python3|libpython|libffi",
    "emulator": r"libcuda|libnccl|libpypipe_emulator",
}


def _instructions() -> dict[str, dict[str, int]]:
    if shutil.which("valgrind") is None:
        raise SystemExit("--instructions needs valgrind")
    few, many = 200, 1000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for messages in (few, many):
            _run(messages, folder)
        counted = {}
        for rank, end in enumerate(("sender", "receiver")):
            less, more = (_by_object(folder / f"{rank}.{messages}") for messages in (few, many))
            counted[end] = {
                what: round((more.get(what, 0) - less.get(what, 0)) / (many - few)) for what in (*_OBJECTS, "rest")
            }
        return counted


def _by_object(path: Path) -> dict[str, int]:
    """Instructions of each kind of library, without those of what it calls."""
    totals: dict[str, int] = {}
    names: dict[str, str] = {}
    kind, skip = "rest", False
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("ob="):
            found = re.match(r"ob=(\(\d+\))\s*(.*)", line)
            if found is None:
                continue
            number, name = found.groups()
            names[number] = name or names.get(number, "")
            kind = next((what for what, pattern in _OBJECTS.items() if re.search(pattern, names[number])), "rest")
        elif line.startswith("cob="):
            found = re.match(r"cob=(\(\d+\))\s*(.+)", line)
            if found is not None:
                names[found.group(1)] = found.group(2)
        elif line.startswith("calls="):
            skip = True  # the next line is what was called
        elif re.match(r"[+\-*\d]", line):
            if skip:
                skip = False
                continue
            totals[kind] = totals.get(kind, 0) + int(line.split()[1])
    return totals


if __name__ == "__main__":
    sys.exit(main())
