"""The layers: an import goes down the list, never up, and no two modules import each other."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pypipe
import pypipe.program

# From the bottom up. A module belongs to the longest name that it begins with.
LAYERS = [
    "pypipe.errors",
    "pypipe._core",
    "pypipe.program",
    "pypipe.planning",
    "pypipe.runtime",  # what all rooms of it may use: environment variables, libraries, memory of tensors
    "pypipe.runtime.rendezvous",
    "pypipe.runtime.diagnostics",
    "pypipe.runtime.autograd",
    "pypipe.runtime.batch",
    "pypipe.runtime.data_parallel",
    "pypipe.runtime.transport",
    "pypipe.runtime.step",
    "pypipe.stage",
    "pypipe.ties",
    "pypipe.inside_stage",
    "pypipe.splitting",
    "pypipe.base_schedule",
    "pypipe.grad_scaler",
    "pypipe.checkpoint",
    "pypipe.schedules",
    "pypipe.compat",
    "pypipe",
    "pypipe.commands",
    "pypipe.__main__",
]
# The same for folders of the core: what is not named beside a folder, it may not include.
CORE = {
    "base": {"base"},
    "control": {"base", "control"},
    "link": {"base", "control", "link"},
    "link/shm": {"base", "control", "link", "link/shm"},
    "link/nccl": {"base", "control", "link", "link/nccl"},
    "channel": {"base", "control", "link", "channel"},
    "python": {"base", "control", "link", "link/shm", "link/nccl", "channel", "python"},
}
NO_TORCH = ("pypipe.errors", "pypipe.program", "pypipe.planning")  # they plan on machines that have none

ROOT = Path(pypipe.__file__).parent
MODULES = {
    ".".join(["pypipe", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
CSRC = Path(__file__).parents[1] / "csrc"


def layer(module: str) -> int:
    fitting = [name for name in LAYERS if module == name or (module.startswith(f"{name}.") and name != "pypipe")]
    assert fitting, f"{module} belongs to no layer: add it to the list"
    return LAYERS.index(max(fitting, key=len))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES or whole == "pypipe._core" else str(node.module)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_an_import_goes_down(module: str) -> None:
    for name in imports(ast.parse(MODULES[module].read_text())):
        if name.partition(".")[0] == "pypipe":
            # `import pypipe` for `pypipe.Something` in a docstring or an annotation is still an import of everything.
            assert layer(name) <= layer(module), f"{module} imports {name}, which is above it"
        elif module.startswith(NO_TORCH):
            assert name.partition(".")[0] in sys.stdlib_module_names, f"{module} imports {name}"


def test_no_two_modules_import_each_other() -> None:
    """As they load; within functions and for annotations they may."""
    graph = {}
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        graph[module] = {name for name in imports(tree) if name in MODULES and not module.startswith(f"{name}.")}
    TopologicalSorter(graph).prepare()  # raises a CycleError, which lists the circle


@pytest.mark.parametrize("path", sorted(CSRC.rglob("*.?pp")), ids=lambda path: str(path.relative_to(CSRC)))
def test_an_include_goes_down(path: Path) -> None:
    folder = str(path.relative_to(CSRC).parent)
    text = path.read_text()
    for name in re.findall(r'^#include "([^"]+)"', text, re.M):
        assert name.rpartition("/")[0] in CORE[folder], f"{path.name} includes {name}"
    others = set(re.findall(r"^#include <([^>]+)>", text, re.M))
    is_foreign = [name for name in others if re.match(r"pybind11/|Python\.h|torch/|ATen/|c10/|cuda|nccl", name)]
    assert not is_foreign or folder == "python", f"{path.name} includes {is_foreign}"


def test_everything_that_the_program_package_exports_is_there() -> None:
    assert all(hasattr(pypipe.program, name) for name in pypipe.program.__all__)
    assert list(pypipe.program.__all__) == sorted(pypipe.program.__all__, key=lambda name: (name.islower(), name))
