"""The command of docs/adding-a-command.md is found and runs as the page says, from one file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from search_path import ROOT

PAGE = (ROOT / "docs" / "adding-a-command.md").read_text()
_RUN = (
    "import sys, pypipe.commands; pypipe.commands.__path__.append({!r}); from pypipe.commands.cli import main; main()"
)


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", _RUN.format(str(folder)), *arguments]  # the installed pypipe
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_one_file_makes_a_command(tmp_path: Path) -> None:
    found = re.search(r"<!-- test: command (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    assert not re.search(rf"^  {found[1]} ", _run(tmp_path, "--help").stdout, re.MULTILINE)
    (tmp_path / f"{found[1]}.py").write_text(found[2])
    assert re.search(rf"^  {found[1]}  +Show which rank", _run(tmp_path, "--help").stdout, re.MULTILINE)
    shown = _run(tmp_path, "placement", "zbv", "-p", "2", "--json")
    assert json.loads(shown.stdout) == {"schedule": "zbv", "stages": [[0, 3], [1, 2]]}
    assert re.search(r"0 +. 0, 3", _run(tmp_path, "placement", "zbv", "-p", "2").stdout)
    refused = _run(tmp_path, "placement", "nothing", "-p", "2")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
