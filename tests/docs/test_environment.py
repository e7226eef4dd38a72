"""Environment variables: the page has what the code has, and all that is read or set is in the tables."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import environment_page
import pytest
from search_path import ROOT

from pypipe.runtime.environment import OTHERS_READ, OTHERS_SET, VARIABLES, read


def test_the_page_is_what_the_tables_of_the_code_give() -> None:
    text = environment_page.PAGE.read_text()
    assert text == environment_page.written(text), "run python tests/docs/environment_page.py"


def _uses(path: Path) -> Iterator[tuple[str, str]]:
    """(how, which) for each variable that a module reads, asks for or sets; `*` where its name is computed."""
    tree = ast.parse(path.read_text())
    outer = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.getenv", "os.putenv", "os.unsetenv"):
            yield "other", "*"
        if not (isinstance(node, ast.Attribute) and ast.unparse(node) == "os.environ"):
            continue
        user = outer[node]
        if isinstance(user, ast.Attribute) and user.attr in ("get", "setdefault"):
            call = outer[user]
            assert isinstance(call, ast.Call)
            yield ("set" if user.attr == "setdefault" else "read"), _name(call.args[0])
        elif isinstance(user, ast.Compare):
            yield "read", _name(user.left)
        elif isinstance(user, ast.Subscript):
            yield ("read" if isinstance(user.ctx, ast.Load) else "other"), _name(user.slice)
        else:
            yield "other", "*"


def _name(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "*"


def test_a_misspelt_variable_is_reported_once(tmp_path: Path) -> None:
    environment = os.environ | {"PYPIPE_LINKS": "shm", "PYPIPE_EMULATOR_SEEDS": "1"}
    command = [sys.executable, "-c", "import pypipe, pypipe.runtime.environment"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("UserWarning") == 1
    assert "PYPIPE_LINKS does nothing: did you mean PYPIPE_LINK?" in done.stderr


def test_a_variable_that_is_empty_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variable in VARIABLES.items():
        monkeypatch.setenv(name, "")
        assert read(name) == variable.default


def test_all_variables_that_the_package_reads_or_sets_are_in_the_tables() -> None:
    # Names that are computed: the tables' own functions, and some that are found beside the call.
    computed = {
        "runtime/environment.py": set(VARIABLES),
        "runtime/libraries.py": {"CUDA_DEVICE_MAX_CONNECTIONS"},
        "runtime/rendezvous/world.py": {"RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"},
        "commands/doctor.py": {*VARIABLES, *OTHERS_READ, *OTHERS_SET},
    }
    found: dict[str, set[str]] = {"read": set(), "set": set(), "other": set()}
    for path in (ROOT / "pypipe").rglob("*.py"):
        place = str(path.relative_to(ROOT / "pypipe"))
        for how, name in _uses(path):
            if (place, how) == ("runtime/environment.py", "other"):
                continue  # looks through all names for misspelt ones
            names = computed[place] if name == "*" and how == "read" else {name}
            if place != "commands/doctor.py" or name != "*":
                found[how] |= names
    assert found["read"] == {*VARIABLES, *OTHERS_READ}
    assert found["set"] == {*OTHERS_SET}
    assert not found["other"]


def test_pypipe_s_own_are_read_by_one_function_and_known_to_the_table() -> None:
    for path in (ROOT / "pypipe").rglob("*.py"):
        for name in re.findall(r"\bPYPIPE_[A-Z_]+[A-Z]\b", path.read_text()):
            assert name in VARIABLES, f"{path} has {name}"
    for path in (ROOT / "csrc").rglob("*.?pp"):
        assert not re.search(r"\b(secure_)?(getenv|setenv|putenv)\b|\benviron\b", path.read_text()), path
