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


# Where the pages count paths from: they leave out what the sentence has said already.
_BASES = [ROOT / base for base in ("", "pypipe", "pypipe/runtime", "pypipe/runtime/transport", "pypipe/commands")]
_TOYS = {"pypipe/commands/placement.py", "pypipe/runtime/transport/links/slow.py", "tests/commands/test_<name>.py"}
_PATH = r"`((?:[\w.<>-]+/)+(?:[\w.<>-]+\.(?:py|hpp|cpp|md))?)`"


@pytest.mark.parametrize("name", ["architecture", "data-path", "adding-a-link", "adding-a-command", "links"])
def test_files_that_a_page_names_are_there(name: str) -> None:
    paths = set(re.findall(_PATH, (DOCS / f"{name}.md").read_text())) - _TOYS
    missing = [path for path in paths if not any((base / path).exists() for base in _BASES)]
    assert not missing


def test_the_architecture_has_every_room() -> None:
    text = (DOCS / "architecture.md").read_text()
    for folder in ("pypipe", "pypipe/runtime"):
        for room in (ROOT / folder).iterdir():
            if (room / "__init__.py").is_file():
                assert re.search(rf"^( +|pypipe/){room.name}/ ", text, re.MULTILINE), room
    for room in (ROOT / "csrc").iterdir():
        assert f"csrc/{room.name}/ " in text, room
    glossary = text.partition("## Glossary")[2]
    assert glossary.count("\n| ") - 2 <= 25
