"""Compares two wheels' contents, and looks at what the extension module links."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ALLOWED = {"libc.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}
NEEDED = {"pypipe/__init__.py", "pypipe/py.typed", "pypipe/_core.pyi", "pypipe/program/drawing/page.html"}


def names(wheel: str) -> set[str]:
    """The files in a wheel."""
    return set(zipfile.ZipFile(wheel).namelist())


def main() -> int:
    """Returns 0 where all is well."""
    first, second = sys.argv[1:]
    if names(first) != names(second):
        print("the wheels differ in:", sorted(names(first) ^ names(second)))
        return 1
    if missing := NEEDED - names(first):
        print("the wheel lacks", missing)
        return 1
    if extra := {name for name in names(first) if not re.match(r"pypipe[/-]", name)}:
        print("the wheel holds what it should not:", extra)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        module = next(name for name in names(first) if name.endswith(".so"))
        path = Path(zipfile.ZipFile(first).extract(module, folder))
        output = subprocess.run(["objdump", "-p", path], check=True, capture_output=True, text=True).stdout
    linked = set(re.findall(r"NEEDED\s+(\S+)", output))
    if not linked <= ALLOWED:
        print("the core links", linked - ALLOWED)
        return 1
    subprocess.run([sys.executable, "-m", "auditwheel", "show", first], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
