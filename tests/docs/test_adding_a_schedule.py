"""The page on adding a schedule: its change, made to a copy of the package, gives what the page shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from search_path import ROOT

import pypipe

PAGE = (ROOT / "docs/adding-a-schedule.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def apply(change: str, root: Path) -> None:
    """Make a change in the format of `diff -u`, whose hunks are found by their text and need no line numbers."""
    for path, text in re.findall(r"^--- \S+\n\+\+\+ b/(\S+)\n(.*?)(?=^--- |\Z)", change, re.MULTILINE | re.DOTALL):
        file = root / path
        content = file.read_text() if file.exists() else ""
        for hunk in re.split(r"^@@.*\n", text, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if not line.startswith("+"))
            new = "".join(line[1:] for line in lines if not line.startswith("-"))
            assert content.count(old) == 1 or not (old or content), f"{path} has no such place, or several:\n{old}"
            content = content.replace(old, new) if old else new
        file.write_text(content)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package after the page's change."""
    root = tmp_path_factory.mktemp("changed")
    source = Path(pypipe.__file__).parent
    shutil.copytree(source, root / "pypipe", ignore=shutil.ignore_patterns("__pycache__"))
    changes = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    assert len(changes) == 1
    apply(changes[0], root)
    return root


def run(root: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("code", "shown"), SNIPPETS, ids=["look", "train"])
def test_a_snippet_prints_what_the_page_shows(changed: Path, code: str, shown: str) -> None:
    assert run(changed, "-c", code) == shown


def test_the_change_is_all_that_the_commands_the_proof_and_the_public_names_need(changed: Path) -> None:
    check = """
import pypipe
from pypipe.program import builder_names, fifo, prepare, simulate

assert pypipe.__file__.startswith({root!r})
assert builder_names().count("fifo") == 1
for ranks in range(1, 6):
    for microbatches in range(1, 8):
        program = fifo(ranks, microbatches)
        assert prepare(program).peak_activations == (microbatches,) * ranks
        assert prepare(program.forward_only()).peak_activations == (1,) * ranks
        bubble = (ranks - 1) / (microbatches + ranks - 1)
        assert abs(simulate(program).bubble_ratio - bubble) < 1e-12
assert "ScheduleFIFO" in pypipe.__all__
assert "n_microbatches:" in pypipe.ScheduleFIFO.__doc__
"""
    run(changed, "-c", check.format(root=str(changed)))
    assert "fifo" in run(changed, "-m", "pypipe", "show", "fifo", "-p", "3", "-m", "4")
    assert "fifo" in run(changed, "-m", "pypipe", "plan", "-p", "3", "-m", "4", "--json")
