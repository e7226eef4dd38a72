"""What the core says of CUDA's and NCCL's ABI is what their headers say; the real NCCL loads and answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path

import pytest
from search_path import ROOT

COMPILER = next(
    (found for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name and (found := shutil.which(name))),
    None,
)

# The packages of the test extra; those for CUDA 12 will do where they are installed already.
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
CUDA = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
COMPILER_PARTS = ("nvidia-cuda-crt", "nvidia-cuda-nvcc-cu12")


def absent(what: str) -> None:
    """Skips the test, except in CI: there it would hide that nothing is tested."""
    message = f"{what} is missing: pip install '.[test]'"
    if os.environ.get("CI"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def installed(packages: Sequence[str], end: str) -> tuple[str, Path]:
    """The first package that is installed, and its file whose path ends so."""
    for package in packages:
        try:
            found = [path for path in files(package) or [] if str(path).endswith(end)]
        except PackageNotFoundError:
            continue
        if found:
            return package, Path(str(found[0].locate()))
    absent(f"{end} of {packages[0]}")
    raise AssertionError


def compile_abi(declarations: Path) -> subprocess.CompletedProcess[str]:
    """Compiles tests/abi/abi.cpp with our declarations in `declarations` beside the real headers."""
    if COMPILER is None:
        absent("a C++ compiler")
    folders = {
        installed(NCCL, "include/nccl.h")[1].parent,
        installed(CUDA, "include/cuda.h")[1].parent,
        installed(COMPILER_PARTS, "include/crt/host_config.h")[1].parents[1],
    }
    system = [part for folder in sorted(folders) for part in ("-isystem", str(folder))]
    command = [str(COMPILER), "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{declarations}"]
    return subprocess.run(
        [*command, *system, str(ROOT / "tests" / "abi" / "abi.cpp")], capture_output=True, text=True, timeout=100
    )


def test_our_declarations_agree_with_the_headers() -> None:
    done = compile_abi(ROOT / "csrc")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("header", "right", "wrong"),
    [
        pytest.param("cuda_abi.hpp", "cuMemAlloc_v2", "cuMemAlloc", id="an older ABI's name"),
        pytest.param("cuda_abi.hpp", "not_ready = 600", "not_ready = 601", id="an error's number"),
        pytest.param("cuda_abi.hpp", "Pointer = unsigned long long", "Pointer = unsigned", id="a narrow handle"),
        pytest.param("cuda_abi.hpp", "stream, EventHandle event", "stream, StreamHandle event", id="a wrong handle"),
        pytest.param("cuda_abi.hpp", "(unsigned flags)", "()", id="a parameter too few"),
        pytest.param("nccl_abi.hpp", "std::size_t count", "int count", id="a narrow count"),
        pytest.param("nccl_abi.hpp", "const void* data", "void* data", id="const lost"),
        pytest.param("nccl_abi.hpp", "UniqueId id, int rank", "UniqueId* id, int rank", id="a pointer for a value"),
        pytest.param("nccl_abi.hpp", "char internal[128]", "char internal[64]", id="a small unique id"),
        pytest.param("nccl_abi.hpp", "in_progress = 7", "in_progress = 8", id="a result's number"),
        pytest.param("nccl_abi.hpp", "uint8 = 1", "uint8 = 0", id="a type's number"),
        pytest.param("nccl_abi.hpp", "int split_share = unset;", "", id="a config field too few"),
        pytest.param("nccl_abi.hpp", "const char* comm_name", "int comm_name", id="a config field's type"),
        pytest.param("nccl_abi.hpp", "0xcafebeef", "0xcafebabe", id="the config's magic"),
    ],
)
def test_a_wrong_declaration_is_noticed(header: str, right: str, wrong: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "csrc" / "link", tmp_path / "link")
    text = (tmp_path / "link" / "nccl" / header).read_text()
    assert right in text
    (tmp_path / "link" / "nccl" / header).write_text(text.replace(right, wrong))
    done = compile_abi(tmp_path)
    assert done.returncode != 0
    assert "static assertion failed" in done.stderr or "static_assert" in done.stderr, done.stderr


# In a process of its own: a library stays loaded for good, and other tests ask which one is.
ASK_NCCL = """
import sys
from pypipe import _core
library, reason = _core.open_nccl(sys.argv[1], [])
assert library is not None, reason
first, second = library.unique_id(), library.unique_id()
assert len(first) == len(second) == 128 and first != second
print(library.path, library.version)
try:
    library.try_communicator(None, _core.WaitPolicy(20))
except _core.CoreError as error:
    print(error.fault, error)
"""


def test_the_real_nccl_answers_and_refuses_clearly_without_a_gpu(tmp_path: Path) -> None:
    package, path = installed(NCCL, "lib/libnccl.so.2")
    done = subprocess.run(
        [sys.executable, "-c", ASK_NCCL, str(path)],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    major, minor, patch, *_ = map(int, version(package).split("."))
    assert first == f"{path} {major * 10000 + minor * 100 + patch}"
    (refusal,) = rest
    assert refusal.startswith("system ncclCommInitRankConfig failed: ncclUnhandledCudaError (1): ")
    assert "NCCL's last words: Cuda failure" in refusal


ASK_LOADED = """
import ctypes, sys
from pypipe import _core
assert _core.loaded_library("libnccl.so.2") is None
ctypes.CDLL(sys.argv[1])
print(_core.loaded_library("libnccl.so.2"), _core.open_nccl("", ["/none/libnccl.so.2"])[0].path)
"""


def test_the_copy_that_the_process_has_loaded_is_the_one_used(tmp_path: Path) -> None:
    _, path = installed(NCCL, "lib/libnccl.so.2")
    done = subprocess.run(
        [sys.executable, "-c", ASK_LOADED, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(path), str(path)]
