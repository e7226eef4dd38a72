"""The tables of docs/environment.md: `python tests/docs/environment_page.py` writes them into the page."""

from __future__ import annotations

import re
from pathlib import Path

from pypipe.runtime.environment import OTHERS_READ, OTHERS_SET, VARIABLES, Variable

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environment.md"
TABLES = {"own": VARIABLES, "read": OTHERS_READ, "set": OTHERS_SET}


def table(variables: dict[str, Variable]) -> str:
    """Variables as a table in markdown."""
    has_defaults = any(variable.default for variable in variables.values())
    rows = [["variable", *(["default"] if has_defaults else []), "meaning"]]
    rows.append(["---"] * len(rows[0]))
    for name, variable in variables.items():
        default = [f"`{variable.default}`" if variable.default else ""] if has_defaults else []
        rows.append([f"`{name}`", *default, variable.meaning])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def written(text: str) -> str:
    """The page with its tables as they should be."""
    for name, variables in TABLES.items():
        mark = f"<!-- table: {name} -->\n"
        assert text.count(mark) == 1, f"{PAGE.name} has no mark for the table {name}"
        before, _, after = text.partition(mark)
        text = before + mark + table(variables) + re.sub(r"\A(\|.*\n)*", "", after)
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
