"""The program package stands at the bottom of the layers."""

import ast
import sys
from pathlib import Path

import pypipe.program


def test_the_package_imports_nothing_but_itself_the_errors_and_the_standard_library() -> None:
    for folder in map(Path, pypipe.program.__path__):
        for path in [*folder.rglob("*.py"), folder.parent / "errors.py"]:
            depth = len(path.relative_to(folder.parent).parts) - 1
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert node.level <= depth, f"{path.name} imports from outside the package"
                    names = [node.module] if node.level == 0 and node.module else []
                else:
                    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                for name in names:
                    is_bottom = name == "pypipe.errors" or name.split(".")[0] in sys.stdlib_module_names
                    assert is_bottom, f"{path.name} imports {name}"


def test_everything_that_the_package_exports_is_there() -> None:
    assert all(hasattr(pypipe.program, name) for name in pypipe.program.__all__)
    assert list(pypipe.program.__all__) == sorted(pypipe.program.__all__, key=lambda name: (name.islower(), name))
