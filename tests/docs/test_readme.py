"""The snippets of the README and of the page on schedules run as they stand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from search_path import ROOT

README = ROOT / "README.md"
SCHEDULES = ROOT / "docs" / "schedules.md"


def _snippets(page: Path, kind: str) -> list[str]:
    pattern = rf"<!-- test: {kind} -->\n```python\n(.*?)```"
    found = re.findall(pattern, page.read_text(), re.DOTALL)
    assert found, f"{page.name} has no snippet marked {kind}"
    return found


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_the_trainer_of_the_readme_trains_from_the_clone() -> None:
    """As the README says it: from the folder of the clone, where `pypipe` is also the name of the source folder."""
    (snippet,) = _snippets(README, "torchrun")
    assert snippet == (ROOT / "examples" / "train.py").read_text()
    assert "torchrun --nproc-per-node 4 examples/train.py" in README.read_text()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", "0"]
    output = _run([*launcher, "--standalone", "examples/train.py"], ROOT)
    losses = [float(text) for text in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 50
    assert losses[-1] < losses[0] / 5, losses


def test_an_import_from_the_source_folder_says_so_and_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "pypipe", tmp_path / "pypipe", ignore=shutil.ignore_patterns("_core*.so", "__pycache__"))
    for arguments in (["-m", "pypipe", "doctor"], ["-c", "import pypipe"]):
        done = subprocess.run([sys.executable, "-S", *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"ImportError: pypipe was imported from {tmp_path / 'pypipe'}, a source folder"), last
        for remedy in ("Start Python from another folder", "PYTHONSAFEPATH=1", "pip install -e ."):
            assert remedy in last


def test_the_programs_of_the_page_on_schedules_print_what_it_says(tmp_path: Path) -> None:
    (snippet,) = _snippets(SCHEDULES, "python")
    (tmp_path / "program.py").write_text(snippet)
    output = _run([sys.executable, "program.py"], tmp_path)
    shown = re.search(r"```text\n(.*?)```", SCHEDULES.read_text(), re.DOTALL)
    assert shown is not None
    assert output == shown[1]
