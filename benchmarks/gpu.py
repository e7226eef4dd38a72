"""Everything that one GPU can show of the NCCL link: is it right, and what does it cost?

`python benchmarks/gpu.py [--json FILE] [--parts ...]` runs each part in a process of its own, with a limit, so that one
which hangs or dies costs only itself. `--emulator FOLDER` runs all parts on the emulator that was built there
(tests/emulator), which shows that the script works, and nothing about speed. benchmarks/gpu_check.sh calls this.

Parts:
  correct    stages in one process, their messages over a communicator of one rank: gradients equal
  two        two processes on one GPU, where NCCL allows it (gpu_two.py); else what NCCL answered
  speed      latency and bandwidth beside bare ncclSend/ncclRecv, and the host's microseconds per call
  several    a message of several tensors: packed, as the link does it, beside a group of sends
  hidden     how much of a transfer is hidden behind a matmul
  c10d       torch.distributed's isend and irecv, between two processes on one GPU, where NCCL allows it
  sanitizer  compute-sanitizer on a small run of the first part; last, since it takes longest and may be skipped
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(TESTS / "helpers"), str(HERE)]
import gpu_two  # noqa: E402
import search_path  # noqa: E402, F401 - with it the other helpers are found

LIMITS = {"correct": 90, "two": 150, "speed": 60, "several": 40, "hidden": 40, "c10d": 60, "sanitizer": 100}
SIZES = [8, 4096, 65536, 1 << 20, 16 << 20, 256 << 20]


def main() -> int:
    """Returns 0 where every part that could run was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=LIMITS, default=list(LIMITS), metavar="PART")
    parser.add_argument(
        "--emulator", metavar="FOLDER", help="use the emulated driver and NCCL of this build, on the CPU"
    )
    parser.add_argument("--part", choices=[*LIMITS, "environment"], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part:
        return _run_here(chosen.part)
    environment = dict(os.environ)
    if chosen.emulator:
        folder = Path(chosen.emulator).resolve()
        environment |= {
            "PYPIPE_CUDA_LIBRARY": str(folder / "libcuda.so.1"),
            "PYPIPE_NCCL_LIBRARY": str(folder / "libnccl.so.2"),
            "PYPIPE_LINK": "nccl",
            "PYPIPE_EMULATOR_DELAY_US": "0",
            "PYPIPE_GPU_DRY": "1",
        }
    elif not _has_gpu():
        print("no GPU that torch can use: nothing was run. On the emulator: --emulator FOLDER", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"emulator": bool(chosen.emulator)}
    end = time.monotonic() + chosen.seconds
    for part in ["environment", *chosen.parts]:
        left = end - time.monotonic()
        limit = min(LIMITS.get(part, 60), left)
        results[part] = _run_apart(part, environment, limit) if left > 10 else {"error": "no time was left for it"}
        print(f"{part}: {json.dumps(results[part])}", flush=True)
        if chosen.json:  # after each part: whoever runs out of time keeps what there is
            Path(chosen.json).write_text(json.dumps(results, indent=2) + "\n")
    parts = [result for result in results.values() if isinstance(result, dict)]
    return int(any("error" in part or part.get("wrong") for part in parts))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _run_apart(part: str, environment: dict[str, str], limit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--part", part]
        said = Path(folder) / "said"
        start = time.perf_counter()
        with said.open("w") as output:  # a file: ranks that hang would keep a pipe open
            process = subprocess.Popen(
                command,
                env={**environment, "PYPIPE_GPU_RESULT": str(result)},
                cwd=folder,  # not the clone, whose pypipe has no core
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            late = False
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                late = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the ranks that it started
            process.wait()
        seconds = round(time.perf_counter() - start, 1)
        if result.exists():
            return {**json.loads(result.read_text()), "seconds": seconds}
        what = f"no end within {limit:.0f} s" if late else f"exit code {process.returncode}"
        return {"error": what, "said": said.read_text(errors="replace")[-4000:], "seconds": seconds}


def _run_here(part: str) -> int:
    functions: dict[str, Callable[[], dict[str, Any]]] = {
        "environment": _environment,
        "correct": _correct,
        "two": _two,
        "sanitizer": _sanitizer,
        "speed": _speed,
        "several": _several,
        "hidden": _hidden,
        "c10d": _c10d,
    }
    try:
        result = functions[part]()
    except Exception:
        result = {"error": traceback.format_exc()[-4000:]}
    Path(os.environ["PYPIPE_GPU_RESULT"]).write_text(json.dumps(result))
    return 0


def _is_dry() -> bool:
    return "PYPIPE_GPU_DRY" in os.environ


def _device() -> Any:
    import torch

    return torch.device("cpu") if _is_dry() else torch.device("cuda", 0)


def _wait() -> None:
    """For the device; on the emulator compute is the host."""
    import torch

    if not _is_dry():
        torch.cuda.synchronize()


def _environment() -> dict[str, Any]:
    import torch

    from pypipe.commands import doctor

    report = doctor.inspect()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": report.gpus,
        "driver": report.cuda.version,
        "nccl": report.nccl.version,
        "nccl_path": report.nccl.path,
        "communicator": report.communicator,
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
    }


def _correct() -> dict[str, Any]:
    import self_loop

    wrong: list[str] = []
    cases = [(model, stages) for model in ("mlp", "gpt", "mixed", "identities") for stages in (2, 3)]
    for model, stages in cases:
        wrong += self_loop.train(_device(), model, stages, 4, 10)
    return {"cases": len(cases), "wrong": wrong}


def _sanitizer() -> dict[str, Any]:
    tool = shutil.which("compute-sanitizer")
    if tool is None or _is_dry():
        return {"skipped": "there is no compute-sanitizer on the path" if tool is None else "not on the emulator"}
    program = (
        f"import sys; sys.path[:0] = [{str(TESTS / 'helpers')!r}]\n"
        "import search_path, torch, self_loop\n"
        "sys.exit(bool(self_loop.train(torch.device('cuda', 0), 'mlp', 2, 2, 4, 1)))"
    )
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMITS["sanitizer"] - 10,
        check=False,
    )
    said = (done.stdout + done.stderr)[-1500:]
    return {"exit_code": done.returncode, "wrong": [said] if done.returncode else [], "said": said}


def _ready(rank: int, size: int, group: Any) -> None:
    """Nothing: a pool's processes start with its first function."""


def _pool() -> Any:
    import rank_pool

    pool = rank_pool.RankPool(2)
    pool.run_raw(2, _ready, timeout=0.0)
    return pool


# How two ranks may share a GPU: from 2.30 on NCCL has a variable for it; before, ranks that seem to be on different
# hosts are not compared.
_WAYS: list[tuple[str, Callable[[int], dict[str, str]]]] = [
    ("NCCL_MULTI_RANK_GPU_ENABLE=1", lambda rank: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
    ("distinct NCCL_HOSTID", lambda rank: {"NCCL_HOSTID": f"pypipe-{rank}"}),
]


def _on_rank(rank: int, size: int, group: Any, way: int, part: str) -> Any:
    os.environ.update(_WAYS[way][1](rank))  # before NCCL is loaded by a first communicator
    return getattr(gpu_two, part)(rank, size, group)


def _two() -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for number, (name, _) in enumerate(_WAYS):
        pool = _pool()
        try:
            found = _two_on(pool, number)
        except AssertionError as error:  # a rank that does not answer
            answers[name] = str(error)[-1500:]
            continue
        finally:
            pool.close()
        if isinstance(found, dict):
            return {"way": name, "answers": answers, **found}
        answers[name] = found
    return {"way": None, "answers": answers}


def _two_on(pool: Any, way: int) -> dict[str, Any] | str:
    """What the parts show; or what was raised in the first one."""
    wrong: list[str] = []
    figures: dict[str, float] = {}
    for part in gpu_two.PARTS:
        results = pool.run_raw(2, _on_rank, way, part, timeout=40.0)
        raised = [str(result.error)[-1500:] for result in results if hasattr(result, "error")]
        if raised and not figures and part == "schedules":
            return raised[0]
        wrong += [f"{part}: {text}" for text in raised if part != "killed_rank" or not text.endswith("died")]
        for problems, measured in (result for result in results if not hasattr(result, "error")):
            wrong += [f"{part}: {text}" for text in problems]
            figures |= {f"{part}: {figure}": value for figure, value in measured.items()}
    return {"wrong": wrong, "figures": figures}


class _Bare:
    """ncclSend and ncclRecv to oneself in one group, called through ctypes: the floor."""

    def __init__(self) -> None:
        from pypipe.runtime import libraries

        self._nccl = ctypes.CDLL(libraries.nccl().path)
        identifier = (ctypes.c_char * 128).from_buffer_copy(libraries.nccl().unique_id())

        class UniqueId(ctypes.Structure):
            _fields_ = [("internal", ctypes.c_char * 128)]

        self._communicator = ctypes.c_void_p()
        unique = UniqueId.from_buffer_copy(identifier)
        self._check(self._nccl.ncclCommInitRank(ctypes.byref(self._communicator), 1, unique, 0))

    @staticmethod
    def _check(result: int) -> None:
        if result != 0:
            raise RuntimeError(f"NCCL answered {result}")

    def exchange(self, parts: Sequence[tuple[int, int]], size: int, stream: int) -> None:
        """Sends so many bytes from the first address of each part, and receives them at its second."""
        nccl, count = self._nccl, ctypes.c_size_t(size)
        self._check(nccl.ncclGroupStart())
        for source, target in parts:
            for call, address in ((nccl.ncclSend, source), (nccl.ncclRecv, target)):
                there = (1, 0, self._communicator, ctypes.c_void_p(stream))  # bytes, to the only rank
                self._check(call(ctypes.c_void_p(address), count, *there))
        self._check(nccl.ncclGroupEnd())

    def exchanges(self, count: int, size: int) -> Callable[[], None]:
        """What exchanges tensors of their own, so many of so many bytes, on a stream of its own."""
        import torch

        tensors = [torch.zeros(size, dtype=torch.uint8, device=_device()) for _ in range(2 * count)]
        parts = [(a.data_ptr(), b.data_ptr()) for a, b in zip(tensors[::2], tensors[1::2], strict=True)]
        stream = torch.cuda.Stream(_device())

        def exchange(kept: Any = tensors) -> None:
            self.exchange(parts, size, stream.cuda_stream)

        return exchange


def _per_call(exchange: Callable[[], None], count: int) -> tuple[float, float]:
    """Microseconds per message until the device is done, and until the host is."""
    for _ in range(3):
        exchange()
    _wait()
    start = time.perf_counter()
    for _ in range(count):
        exchange()
    issued = time.perf_counter()
    _wait()
    return (time.perf_counter() - start) / count * 1e6, (issued - start) / count * 1e6


def _looped(*sizes: int) -> tuple[Any, Callable[[], None], Callable[[], None]]:
    """A self loop, and what starts and what ends one message of such tensors over it."""
    import self_loop
    import torch

    from pypipe.program import Kind
    from pypipe.runtime.transport.channel import Tag

    loop = self_loop.SelfLoop(_device())
    sender, receiver = loop.channel(2)
    layout = sender.announce("{}", list(sizes), 0)
    tensors = [torch.zeros(size, dtype=torch.uint8, device=_device()) for size in sizes]
    tag = Tag(0, Kind.F.order, 0, 0, 0)

    def start() -> None:
        receiver.post(0)
        sender.transfer(layout, tag, tensors)
        loop.issue()

    def end() -> None:
        receiver.release(receiver.wait(tag))

    return loop, start, end


def _speed() -> dict[str, Any]:
    sizes = SIZES[:3] if _is_dry() else SIZES
    rows = []
    bare = None if _is_dry() else _Bare()
    for size in sizes:
        count = 20 if _is_dry() else max(10, min(1000, int(2e9 / max(size, 1 << 16))))
        device, host = _through_the_link([size], count)
        row = {"bytes": size, "pypipe_us": device, "pypipe_host_us": host, "pypipe_GBps": size / device / 1e3}
        if bare is not None:
            floor = bare.exchanges(1, size)
            device, host = _median(functools.partial(_per_call, floor, count))
            row |= {"bare_us": device, "bare_host_us": host, "bare_GBps": size / device / 1e3}
        rows.append(row)
    return {"rows": rows, "note": "one process, one send and one receive in a group; bare through ctypes"}


def _through_the_link(sizes: Sequence[int], count: int) -> tuple[float, float]:
    """As _per_call(), for messages of such tensors."""
    loop, start, end = _looped(*sizes)

    def exchange() -> None:
        start()
        end()

    try:
        return _median(lambda: _per_call(exchange, count))
    finally:
        loop.close()


def _several() -> dict[str, Any]:
    """What packing costs beyond one tensor of the same bytes, and what a group of sends costs beyond one send."""
    rows = []
    bare = None if _is_dry() else _Bare()
    for number in (2, 8):
        for size in (4096, 65536) if _is_dry() else (4096, 65536, 1 << 20, 8 << 20):
            count = 20 if _is_dry() else max(10, min(500, int(1e9 / (number * size))))
            row: dict[str, Any] = {"tensors": number, "bytes_each": size}
            row["packed_us"], row["packed_host_us"] = _through_the_link([size] * number, count)
            row["one_us"], row["one_host_us"] = _through_the_link([size * number], count)
            if bare is not None:
                for name, exchange in (
                    ("bare_group", bare.exchanges(number, size)),
                    ("bare_one", bare.exchanges(1, number * size)),
                ):
                    times = _median(functools.partial(_per_call, exchange, count))
                    row[f"{name}_us"], row[f"{name}_host_us"] = times
            rows.append(row)
    return {"rows": rows, "note": "packing pays where packed - one is less than bare_group - bare_one"}


def _median(measure: Callable[[], tuple[float, float]], rounds: int = 5) -> tuple[float, float]:
    samples = [measure() for _ in range(1 if _is_dry() else rounds)]
    return statistics.median(sample[0] for sample in samples), statistics.median(sample[1] for sample in samples)


def _hidden() -> dict[str, Any]:
    import torch

    size = 4096 if _is_dry() else 64 << 20
    loop, start, end = _looped(size)
    width = 64 if _is_dry() else 8192
    dtype = torch.float32 if _is_dry() else torch.bfloat16
    a = torch.randn(width, width, device=_device(), dtype=dtype)
    out = torch.empty_like(a)

    def matmul() -> None:
        torch.mm(a, a, out=out)

    def seconds(*calls: Callable[[], None]) -> float:
        samples = []
        for _ in range(2 if _is_dry() else 7):
            _wait()
            start = time.perf_counter()
            for call in calls:
                call()
            _wait()
            samples.append(time.perf_counter() - start)
        return statistics.median(samples)

    try:
        matmul()
        start()
        end()
        transfer, compute, both = seconds(start, end), seconds(matmul), seconds(start, matmul, end)
    finally:
        loop.close()
    hidden = (transfer + compute - both) / min(transfer, compute)
    times = {"transfer_us": transfer * 1e6, "matmul_us": compute * 1e6, "both_us": both * 1e6}
    return {"bytes": size, **times, "hidden": hidden}


def _c10d_rank(rank: int, size: int, group: Any, way: int) -> list[dict[str, float]]:
    import torch
    import torch.distributed as dist

    os.environ.update(_WAYS[way][1](rank))
    torch.cuda.set_device(0)
    pair = dist.new_group([0, 1], backend="nccl")
    rows = []
    for bytes_ in SIZES:
        tensor = torch.zeros(bytes_, dtype=torch.uint8, device="cuda")
        count = max(10, min(300, int(1e9 / max(bytes_, 1 << 16))))

        def exchange(tensor: Any = tensor) -> None:
            work = dist.isend(tensor, 1, pair) if rank == 0 else dist.irecv(tensor, 0, pair)
            assert work is not None  # both ranks are in the group
            work.wait()

        device, host = _per_call(exchange, count)
        rows.append({"bytes": bytes_, "us": device, "host_us": host})
    return rows


def _c10d() -> dict[str, Any]:
    if _is_dry():
        return {"skipped": "not on the emulator"}
    answers: dict[str, Any] = {}
    for number, (name, _) in enumerate(_WAYS):
        pool = _pool()
        try:
            results = pool.run_raw(2, _c10d_rank, number, timeout=25.0)
        except AssertionError as error:
            answers[name] = str(error)
            continue
        finally:
            pool.close()
        raised = [result.error for result in results if hasattr(result, "error")]
        if not raised:
            return {"way": name, "sender": results[0], "receiver": results[1]}
        answers[name] = str(raised[0])[-1500:]
    return {"way": None, "answers": answers}


if __name__ == "__main__":
    sys.exit(main())
