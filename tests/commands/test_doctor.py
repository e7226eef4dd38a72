"""`pypipe doctor`: what it finds, what it says of it, and that nothing is loaded before it is asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pypipe import _core
from pypipe.commands import doctor
from pypipe.runtime.environment import OTHERS_READ, OTHERS_SET, VARIABLES

pytestmark = pytest.mark.timeout(60)


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the doctor where no GPU can be seen, whether this machine has one or not."""
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-m", "pypipe", "doctor", *arguments],
        cwd=folder,
        env={**clean, "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def examine(folder: Path, **variables: str) -> dict[str, Any]:
    done = run(folder, "--json", **variables)
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    assert done.returncode == (0 if report["healthy"] else 1), done.stderr
    return report


def test_a_machine_without_a_gpu_is_told_so_and_is_healthy(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stages run on the CPU here" in done.stdout
    for name in ("pypipe", "torch", "CUDA driver", "NCCL", *VARIABLES):
        assert name in done.stdout


def test_the_report_as_json_has_every_library_and_variable(tmp_path: Path) -> None:
    report = examine(tmp_path, PYPIPE_LINK="shm", NCCL_DEBUG="VERSION", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert report["healthy"]
    assert report["gpus"] == []
    assert report["communicator"] is None
    assert report["core"]["path"] == _core.__file__
    assert report["torch"]["version"]
    assert set(VARIABLES) < set(report["environment"])
    assert report["environment"]["PYPIPE_LINK"]["value"] == "shm"
    assert report["environment"]["PYPIPE_ADDRESS"]["value"] is None
    assert report["environment"]["NCCL_DEBUG_FILE"]["value"] is None  # which the command itself sets
    assert report["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"]["value"] == "1"
    assert any("torch" in note and "NCCL" in note for note in report["notes"])


def test_the_environment_alone_is_listed_without_torch(tmp_path: Path) -> None:
    program = "import sys; from pypipe.commands.cli import main; main(['doctor', '--env'], standalone_mode=False)"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; sys.exit('torch' in sys.modules)"],
        cwd=tmp_path,
        env={**os.environ, "PYPIPE_LINK": "c10d", "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for name in (*VARIABLES, *OTHERS_READ, *OTHERS_SET):
        assert f"\n{name} " in done.stdout
    assert re.search("^PYPIPE_LINK +c10d +Which link", done.stdout, re.MULTILINE)
    assert re.search("^PYPIPE_NCCL_MAX_CTAS +auto [(]default[)] +", done.stdout, re.MULTILINE)
    listed = json.loads(run(tmp_path, "--env", "--json", PYPIPE_LINK="shm").stdout)
    assert listed.keys() == {*VARIABLES, *OTHERS_READ, *OTHERS_SET}
    assert listed["PYPIPE_LINK"]["value"] == "shm"


@pytest.mark.parametrize(("broken", "alien"), [("nccl", "cuda"), ("cuda", "nccl")])
def test_a_named_library_that_cannot_be_used_is_an_error_and_no_other_takes_its_place(
    broken: str, alien: str, tmp_path: Path
) -> None:
    variables = {"nccl": "PYPIPE_NCCL_LIBRARY", "cuda": "PYPIPE_CUDA_LIBRARY"}
    libc = _core.loaded_library("libc.so.6")
    assert libc is not None
    none = str(tmp_path / "none.so")
    report = examine(tmp_path, **{variables[broken]: none, variables[alien]: libc})
    assert not report["healthy"]
    for library, path, problem in ((broken, none, "No such file"), (alien, libc, "lacks")):
        assert report[library]["broken"]
        assert report[library]["path"] is None
        assert path in report[library]["problem"]
        assert problem in report[library]["problem"]
        assert any(f"Correct {variables[library]}" in note for note in report["notes"])


def report_with(**findings: Any) -> doctor.Report:
    names = ("core", "torch", "cuda", "nccl")
    libraries = {name: findings.pop(name, doctor.Library(name)) for name in names}
    return doctor.Report(pypipe="1", python="3", **libraries, **findings)


TORCH = doctor.Library("torch", "/site/torch", "2.14.1")


@pytest.mark.parametrize(
    ("findings", "said"),
    [
        ({"torch_cuda": None}, "uses no NCCL"),
        ({"torch_cuda": "13.0"}, "torch is built without NCCL"),
        ({"torch_nccl": "/a/libnccl.so.2"}, "torch uses NCCL 2.30.7: /a/libnccl.so.2. pypipe uses the same copy."),
        ({"torch_nccl": "/b/libnccl.so.2"}, "pypipe uses another copy, /a/libnccl.so.2"),
        ({"torch_nccl": "/site/torch"}, "part of its own libraries (/site/torch). pypipe uses another copy"),
    ],
)
def test_the_copy_of_nccl_that_torch_uses_is_named(findings: dict[str, Any], said: str) -> None:
    defaults = {"torch_cuda": "13.0", "torch_nccl_version": "2.30.7"}
    report = report_with(torch=TORCH, nccl=doctor.Library("NCCL", "/a/libnccl.so.2", "2.30.7"), **(defaults | findings))
    doctor._explain(report)
    assert any(said in note for note in report.notes), report.notes


@pytest.mark.parametrize(
    ("findings", "said"),
    [
        ({"cuda": doctor.Library("CUDA", "/c", problem="cuInit failed: X (100): none")}, "check CUDA_VISIBLE_DEVICES"),
        ({"cuda": doctor.Library("CUDA", "/c", problem="cuInit failed: X (34): stub")}, "the stub"),
        ({"gpus": ["H200"], "torch": doctor.Library("torch", "/t", "2.13.0+cpu")}, "install a build of torch for CUDA"),
        ({"gpus": ["H200"]}, "pip install 'pypipe[cu13]'"),
        ({"torch": doctor.Library("torch", problem="no", broken=True)}, "torch does not load"),
        ({"core": doctor.Library("core", problem="no", broken=True)}, "install pypipe again"),
    ],
)
def test_what_is_missing_is_explained(findings: dict[str, Any], said: str) -> None:
    report = report_with(**findings)
    doctor._explain(report)
    assert any(said in note for note in report.notes), report.notes


@pytest.mark.parametrize(("value", "explained"), [("1", True), ("8", False)])
def test_one_queue_for_all_streams_is_explained(value: str, explained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    report = report_with()
    doctor._explain(report)
    assert explained == any("CUDA_DEVICE_MAX_CONNECTIONS=1" in note for note in report.notes)


@pytest.mark.parametrize(
    ("value", "connections", "communicators"), [(None, 8, 2), ("", 8, 2), ("many", 8, 2), ("16", 16, 5), ("32", 32, 10)]
)
def test_streams_are_held_against_connections_where_there_is_a_gpu(
    value: str | None, connections: int, communicators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    without, report = report_with(), report_with(gpus=["a GPU"])
    doctor._explain(without)
    doctor._explain(report)
    assert not any("queues of work" in note for note in without.notes)
    (note,) = (note for note in report.notes if "queues of work" in note)
    assert f"share {connections} queues" in note
    assert f"up to {communicators} communicators" in note
    assert ("set CUDA_DEVICE_MAX_CONNECTIONS=32" in note) == (connections < 32)


def test_importing_pypipe_and_its_core_loads_no_gpu_library(tmp_path: Path) -> None:
    program = "import pypipe, pypipe._core; print(open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "_core" in done.stdout
    assert not any(name in done.stdout for name in ("libcuda", "libnccl", "libcudart"))


def test_a_library_that_this_process_has_loaded_is_told_by_its_file() -> None:
    path = _core.loaded_library("libc.so.6")
    assert path is not None
    assert Path(path).is_file()
    assert _core.loaded_library("libnothing.so.7") is None
