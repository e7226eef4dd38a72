"""The snippets of the pages in docs/ run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from search_path import ROOT

DOCS = ROOT / "docs"
SNIPPETS = [
    (page.name, int(ranks), text)
    for page in sorted(DOCS.glob("*.md"))
    for ranks, text in re.findall(r"<!-- test: torchrun (\d+) -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("page", "ranks", "text"), SNIPPETS, ids=[page for page, _, _ in SNIPPETS])
def test_a_snippet_runs_under_torchrun(page: str, ranks: int, text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*launcher, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_from_the_root_lead_to_files(name: str) -> None:
    """Sphinx looks at those between the pages."""
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []
