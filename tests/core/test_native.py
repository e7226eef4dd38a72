"""Builds the programs of tests/cpp, plain and under sanitizers, and runs them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from search_path import ROOT


class Variant(NamedTuple):
    """One way to build the programs."""

    sanitizers: str
    flags: str
    strict: bool


VARIANTS = {
    "plain": Variant("", "-O2", True),
    # Compilers take far longer over sanitized code; little optimization keeps that bearable.
    "asan": Variant("address,undefined", "-O0", False),
    "tsan": Variant("thread", "-Og", False),
}

# The arguments of each run. A sanitizer looks at every access, so it needs fewer of them; what only speed provokes
# is for the plain build.
RUNS: dict[str, dict[str, str]] = {
    "frame_test": {"plain": "1 2000", "asan": "2 300", "tsan": "3 50"},
    "segment_test": {"plain": "2000", "asan": "500", "tsan": "500"},
    "link_test": {"plain": "300", "asan": "50", "tsan": "50"},
    "hub_stress": {"plain": "1 100", "asan": "2 20", "tsan": "3 20"},
    "action_log_stress": {"plain": "1 20", "asan": "2 5", "tsan": "3 5"},
    "doorbell_stress": {"plain": "1 500000", "asan": "2 100000", "tsan": "3 100000"},
    # Seed, messages each way, polls before parking.
    "channel_stress sleeping": {"plain": "1 700000 0", "asan": "2 40000 0", "tsan": "3 40000 0"},
    "channel_stress spinning": {"plain": "4 100000 2000", "asan": "5 20000 2000", "tsan": "6 10000 2000"},
}

# A report fails the test even where the process that it is about is a forked child.
ENVIRONMENT = {
    **os.environ,
    "ASAN_OPTIONS": "halt_on_error=1:detect_leaks=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
REPORTS = ("Sanitizer", "runtime error:")


def has_compiler() -> bool:
    """Whether there is anything that CMake could compile C++ with."""
    candidates = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"]
    return any(shutil.which(candidate) for candidate in candidates if candidate)


pytestmark = [
    pytest.mark.skipif(
        not has_compiler(),
        reason="no C++ compiler (c++, g++, clang++ or $CXX): pypipe's core cannot be built here",
    ),
    pytest.mark.timeout(300),  # a build on a busy machine; each program has a watchdog of its own
]


def tool(name: str) -> str:
    """A program of the test extra: beside this Python, or else on the path."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    assert found, f"{name} is missing: pip install '.[test]'"
    return found


def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs a command; fails the test with all that it said unless it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT, check=False)
    except subprocess.TimeoutExpired as late:
        said = "".join(part.decode(errors="replace") for part in (late.stdout, late.stderr) if isinstance(part, bytes))
        pytest.fail(f"{' '.join(command)}: still running after {timeout} s\n{said}", pytrace=False)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}: exit code {done.returncode}\n{said}", pytrace=False)
    return done


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds a variant when it is first asked for, and returns the folder of its programs."""
    built: dict[str, Path] = {}
    failed: dict[str, str] = {}

    def build(name: str) -> Path:
        if name in built:
            return built[name]
        if name in failed:
            pytest.fail(f"the {name} build has failed: see the first of its tests", pytrace=False)
        variant = VARIANTS[name]
        folder = tmp_path_factory.mktemp(f"native-{name}")
        failed[name] = "unless it comes to its end"
        run(
            [
                *(tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"),
                f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
                "-DCMAKE_BUILD_TYPE=Native",  # a name that brings no flags of its own
                f"-DCMAKE_CXX_FLAGS={variant.flags}",
                f"-DPYPIPE_SANITIZE={variant.sanitizers}",
                f"-DPYPIPE_STRICT={'ON' if variant.strict else 'OFF'}",
                "-DCMAKE_UNITY_BUILD=ON",  # in two thirds of the time
                "-DCMAKE_UNITY_BUILD_BATCH_SIZE=100",
                "-DPYPIPE_BINDINGS=OFF",
                "-DPYPIPE_NATIVE_TESTS=ON",
            ],
            timeout=120,
        )
        run([tool("cmake"), "--build", str(folder), "-j", "2"], timeout=280)
        del failed[name]
        built[name] = folder / "tests" / "cpp"
        return built[name]

    return build


@pytest.fixture(scope="session")
def launcher() -> list[str]:
    """What to put before a program.

    Sanitizers map their shadow memory at fixed places. Where the kernel randomizes addresses over a wide
    range (vm.mmap_rnd_bits=32, the default of recent distributions), something else may lie there already,
    and older runtimes die at start. `setarch -R` switches that off; some containers forbid it, and mostly
    don't need it.
    """
    setarch = shutil.which("setarch")
    if setarch is None:
        return []
    command = [setarch, platform.machine(), "-R"]
    tried = subprocess.run([*command, "true"], capture_output=True, timeout=30, check=False)
    return command if tried.returncode == 0 else []


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_program(variant: str, name: str, build: Callable[[str], Path], launcher: list[str]) -> None:
    program = build(variant) / name.split()[0]
    prefix = launcher if VARIANTS[variant].sanitizers else []
    done = run([*prefix, str(program), *RUNS[name][variant].split()], timeout=200)
    said = done.stdout + done.stderr
    assert not any(report in said for report in REPORTS), said
    print(said, end="")
