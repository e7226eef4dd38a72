"""Where tests find each other's helpers: importing this puts every folder of tests/ on `sys.path`.

Helpers have names of their own, so that rank processes can import what they run by its name. The clone's root comes off
the path, since the pypipe there has no core: what is tested is the installed one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["FOLDERS", "PYTHONPATH", "ROOT"]

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted({str(path.parent) for path in (ROOT / "tests").glob("*/**/*.py")})
PYTHONPATH = os.pathsep.join([*FOLDERS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
"""For scripts that tests start. An empty entry would be the folder that they are started in."""

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]
