"""Builds the emulator, and steers it from Python. Nothing here imports torch or pypipe."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
BUILDS = HERE.parents[1] / "build"


class Emulator(NamedTuple):
    """Where the libraries and programs of one build lie."""

    folder: Path

    @property
    def cuda(self) -> Path:
        return self.folder / "libcuda.so.1"

    @property
    def nccl(self) -> Path:
        return self.folder / "libnccl.so.2"

    @property
    def old_nccl(self) -> Path:
        """NCCL 2.18: without ncclCommRegister, ncclMemAlloc and their counterparts."""
        return self.folder / "nccl218" / "libnccl.so.2"

    @property
    def control(self) -> Path:
        return self.folder / "libpypipe_emulator.so"


def has_compiler() -> bool:
    """Whether there is anything that CMake could compile C++ with."""
    candidates = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"]
    return any(shutil.which(candidate) for candidate in candidates if candidate)


def _tool(name: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        raise RuntimeError(f"{name} is missing: pip install '.[test]'")
    return found


@functools.cache
def build(sanitizers: str = "", flags: str = "-O2") -> Emulator:
    """Builds in build/emulator*, which a later session finds up to date. Several processes may call it at once."""
    folder = BUILDS / ("emulator-" + sanitizers.replace(",", "-") if sanitizers else "emulator")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run(
            *(_tool("cmake"), "-S", str(HERE), "-B", str(folder), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
            "-DCMAKE_BUILD_TYPE=Native",  # a name that brings no flags of its own
            f"-DCMAKE_CXX_FLAGS={flags}",
            "-DCMAKE_UNITY_BUILD=ON",  # in half the time
            "-DCMAKE_UNITY_BUILD_BATCH_SIZE=100",
            f"-DPYPIPE_SANITIZE={sanitizers}",
            f"-DPYPIPE_STRICT={'OFF' if sanitizers else 'ON'}",
        )
        _run(_tool("cmake"), "--build", str(folder), "-j", "2")
    return Emulator(folder)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


class Control:
    """The control functions of the engine in this process: control.h says what they do."""

    def __init__(self, emulator: Emulator) -> None:
        self._library = ctypes.CDLL(str(emulator.control))
        for name in ("hazards", "host_synchronizations", "allocations", "operations", "completed", "checker_nodes"):
            self._function(name).restype = ctypes.c_uint64
        self._function("last_report").restype = ctypes.c_size_t

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"pypipe_emulator_{name}")

    def set(self, name: str, value: object) -> None:
        """Sets a knob."""
        if self._function("set")(name.encode(), str(value).encode()) != 0:
            raise ValueError(f"the emulator has no knob {name} that takes {value}")

    def fault(self, fault: str) -> None:
        """Plans faults, `kind@n` with commas between; "" forgets them."""
        if self._function("fault")(fault.encode()) != 0:
            raise ValueError(f"the emulator knows no fault {fault}")

    def hazards(self, kind: str | None = None) -> int:
        return int(self._function("hazards")(None if kind is None else kind.encode()))

    def last_report(self) -> str:
        text = ctypes.create_string_buffer(self._function("last_report")(None, ctypes.c_size_t(0)) + 1)
        self._function("last_report")(text, ctypes.c_size_t(len(text)))
        return text.value.decode()

    def host_synchronizations(self) -> int:
        return int(self._function("host_synchronizations")())

    def allocations(self) -> int:
        return int(self._function("allocations")())

    def operations(self) -> int:
        """How many sends and receives this process has issued."""
        return int(self._function("operations")())

    def completed(self) -> int:
        return int(self._function("completed")())

    def checker_nodes(self) -> int:
        return int(self._function("checker_nodes")())

    def reset_counters(self) -> None:
        self._function("reset_counters")()

    def label(self, label: str | None) -> None:
        """Names what this thread's following calls do."""
        self._function("label")(None if label is None else label.encode())

    def name_stream(self, stream: int, name: str) -> None:
        self._function("name_stream")(ctypes.c_void_p(stream), name.encode())

    def reads(self, data: int, size: int, name: str, stream: int = 0) -> None:
        """Compute reads memory: on stream 0 the calling thread, now."""
        self._function("reads")(ctypes.c_void_p(data), ctypes.c_size_t(size), ctypes.c_void_p(stream), name.encode())

    def writes(self, data: int, size: int, name: str, stream: int = 0) -> None:
        """Compute writes memory."""
        self._function("writes")(ctypes.c_void_p(data), ctypes.c_size_t(size), ctypes.c_void_p(stream), name.encode())

    def allocated(self, data: int, size: int) -> None:
        self._function("allocated")(ctypes.c_void_p(data), ctypes.c_size_t(size))

    def freed(self, data: int, size: int) -> None:
        """To be called before the memory really is freed: it is filled with poison."""
        self._function("freed")(ctypes.c_void_p(data), ctypes.c_size_t(size))

    def recycled(self, data: int, size: int, stream: int) -> None:
        """Freed to an allocator that gives it to later work of the stream. It stays as it is until that work comes."""
        self._function("recycled")(ctypes.c_void_p(data), ctypes.c_size_t(size), ctypes.c_void_p(stream))

    def settle(self, stream: int) -> None:
        """Waits for the stream, without an order in the checker's eyes."""
        self._function("settle")(ctypes.c_void_p(stream))

    def join_threads(self) -> None:
        self._function("join_threads")()
