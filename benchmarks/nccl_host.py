"""The host's share of one send and one receive over the NCCL link, without a GPU: it says nothing of a GPU's speed.

    python benchmarks/nccl_host.py [--json] [--messages N] [--instructions]

First, what is pypipe's own: CPU time of the calling thread, with a driver and an NCCL that do nothing
(idle_device.cpp, which takes a C++ compiler), and what of it the kernel takes. Then two processes on the emulator: one
sends, and the other receives when all has arrived, so that no call waits. There, nanoseconds are those of the whole
call, with the emulator's part in it. With --instructions, nccl_core.py runs under valgrind's callgrind with two numbers
of messages, and the difference is what the core and its bindings execute in user space for one send and one receive,
with what they call of the C and C++ libraries, on the calling thread and on the two control threads.
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
    parser.add_argument("--instructions", action="store_true", help="count instructions too (valgrind)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        print(json.dumps(_rank(chosen.rank, chosen.store, chosen.messages)))
        return 0
    result: dict[str, Any] = {"bytes": BYTES, "load_average": round(os.getloadavg()[0], 2)}
    result["own_ns"] = _own()
    result["ns"] = {name: value for said in _run(chosen.messages) for name, value in said.items()}
    if chosen.instructions:
        result["instructions"] = _instructions()
    if chosen.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"{BYTES} bytes, load average {result['load_average']}")
    for name, spent in result["own_ns"].items():
        parts = ", ".join(f"{part} {value:.0f}" for part, value in spent.items())
        print(f"  {name:8} CPU time of the calling thread, nothing of the device's in it, in ns: {parts}")
    print("medians of the wall's time, emulator included")
    for name, value in result["ns"].items():
        print(f"  {name:8} {value:8.0f} ns")
    for thread, counted in result.get("instructions", {}).items():
        print(f"  {counted:8} instructions of the core for a send and a receive, on the {thread}")
    return 0


def _own(turns: int = 5, messages: int = 16_000) -> dict[str, dict[str, float]]:
    from pypipe import _core

    with tempfile.TemporaryDirectory() as folder:
        idle = f"{folder}/libidle.so"
        compiler = os.environ.get("CXX", "c++").split()
        flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-I", str(HERE.parent / "csrc")]
        subprocess.run([*compiler, *flags, "-o", idle, str(HERE / "idle_device.cpp")], check=True)
        command = [sys.executable, str(HERE / "nccl_core.py"), str(_core.__file__), str(messages), idle, idle]
        said = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(turns)]
    return {
        end: {
            "all": statistics.median(one[end]["all"] for one in said),
            "kernel": statistics.median(one[end]["kernel"] for one in said),
            "own code": statistics.median(one[end]["all"] - one[end]["kernel"] for one in said),
        }
        for end in ("send", "receive")
    }


def _environment(emulator: Any) -> dict[str, str]:
    return os.environ | {
        "PYPIPE_CUDA_LIBRARY": str(emulator.cuda),
        "PYPIPE_NCCL_LIBRARY": str(emulator.nccl),
        "PYPIPE_LINK": "nccl",
        "PYPIPE_EMULATOR_DELAY_US": "0",
        "PYPIPE_EMULATOR_IN_PROGRESS": "0",
        "PYPIPE_EMULATOR_LAZY": "0",
        "OMP_NUM_THREADS": "1",
    }


def _emulator() -> Any:
    sys.path.insert(0, str(HERE.parent / "tests" / "emulator"))
    import cuda_emulator

    print("building the emulator, unless it is there already", file=sys.stderr)
    return cuda_emulator.build()


def _run(messages: int) -> list[dict[str, float]]:
    environment = _environment(_emulator())
    with tempfile.TemporaryDirectory() as store_dir:
        processes = []
        for rank in range(2):
            command = [sys.executable, __file__, "--rank", str(rank), "--store", store_dir, "--messages", str(messages)]
            processes.append(
                subprocess.Popen(
                    command, env=environment, cwd=store_dir, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
    from pypipe.runtime.rendezvous.config import Config
    from pypipe.runtime.rendezvous.world import find_world
    from pypipe.runtime.transport.channel import Tag
    from pypipe.runtime.transport.connection import connect

    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]  # public, but not in __all__
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    forward, backward = Channel(Kind.F, 0, 1), Channel(Kind.B, 1, 0)
    links = {forward: Link(Kind.F, 0, 1), backward: Link(Kind.B, 1, 0)}
    connection = connect(
        find_world(),
        torch.device("cpu"),
        links,
        lambda _: {forward: BATCH, backward: 1},
        Config(),
        lambda configs: None,
        600.0,
    )
    there, back = Tag(0, Kind.F.order, 0, 1, 1), Tag(1, Kind.B.order, 0, 1, 1)
    tensor = torch.zeros(BYTES, dtype=torch.uint8)
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Any, *args: Any) -> Any:
        start = time.perf_counter_ns()
        result = call(*args)
        times.setdefault(name, []).append(time.perf_counter_ns() - start)
        return result

    if rank == 0:
        sender, receiver = connection.senders[forward], connection.receivers[backward]
        layout = sender.announce("{}", [BYTES], 0)
        for _ in range(messages // BATCH):
            for _ in range(BATCH):
                timed("send", sender.transfer, layout, there, [tensor])
            receiver.post(0)
            receiver.release(receiver.wait(back))
    else:
        sender, receiver = connection.senders[backward], connection.receivers[forward]
        layout = sender.announce("{}", [BYTES], 0)
        for _ in range(messages // BATCH):
            time.sleep(0.002)  # until all has been announced
            for _ in range(BATCH):
                timed("post", receiver.post, 0)
            time.sleep(0.002)  # until all has arrived
            for _ in range(BATCH):
                message = timed("receive", receiver.wait, there)
                timed("release", receiver.release, message)
            sender.transfer(layout, back, [tensor])
    connection.close()
    dist.destroy_process_group()
    return {name: statistics.median(samples) for name, samples in times.items()}


_THREADS = {"calling thread": "01", "sender's control thread": "02", "receiver's control thread": "03"}


def _instructions() -> dict[str, int]:
    if shutil.which("valgrind") is None:
        raise SystemExit("--instructions needs valgrind, which is not on the path (Debian: apt install valgrind)")
    from pypipe import _core

    emulator = _emulator()
    few, many = 320, 1280
    with tempfile.TemporaryDirectory() as folder:
        for messages in (few, many):
            file = f"--callgrind-out-file={folder}/{messages}"
            core = [str(_core.__file__), str(messages), str(emulator.cuda), str(emulator.nccl)]
            command = ["valgrind", "--tool=callgrind", "--separate-threads=yes", file, sys.executable]
            done = subprocess.run(
                [*command, str(HERE / "nccl_core.py"), *core],
                env=_environment(emulator),
                capture_output=True,
                text=True,
                timeout=900,
                check=False,
            )
            if done.returncode != 0:
                raise SystemExit(f"valgrind ended with {done.returncode}: {done.stderr[-2000:]}")
        return {
            thread: round(
                (_of_core(Path(folder) / f"{many}-{number}") - _of_core(Path(folder) / f"{few}-{number}"))
                / (many - few)
            )
            for thread, number in _THREADS.items()
        }


def _of_core(path: Path) -> int:
    """What the core executed, and the C and C++ libraries for it."""
    names: dict[str, str] = {}

    def name_of(text: str) -> str:
        number, _, name = text.partition(" ")
        if name:
            names[number] = name
        return names[number]

    total, here, called, is_call = 0, "", "", False
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("ob="):
            here = called = name_of(line[3:])
        elif line.startswith("fn="):
            called = here
        elif line.startswith("cob="):
            called = name_of(line[4:])
        elif line.startswith("calls="):
            is_call = True  # the next line has what the callee took
        elif re.match(r"[+\-*\d]", line):
            where = called if is_call else here
            if "_core.cpython" in here and (not is_call or re.search(r"libc\.|libstdc|libpthread|ld-linux", where)):
                total += int(line.split()[1])
            if is_call:
                is_call, called = False, here
    return total


if __name__ == "__main__":
    sys.exit(main())
