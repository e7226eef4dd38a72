"""What the pages say of failures is what is printed; their table has every error, and messages that are in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import when_it_fails
from search_path import ROOT

import pypipe.errors

TABLE = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)


@pytest.mark.timeout(300)
def test_what_the_pages_say_of_failures_is_what_is_printed() -> None:
    written = {page.name: when_it_fails.blocks(page.read_text()) for page in when_it_fails.PAGES}
    printed = when_it_fails.outputs()
    assert written["errors.md"].keys() == printed.keys()
    for page, blocks in written.items():
        for name, text in blocks.items():
            shown = printed[name]
            assert when_it_fails.masked(text) == when_it_fails.masked(shown), f"{page}, {name}:\n{shown}"


def test_every_error_has_its_row() -> None:
    public = {*pypipe.errors.__all__, "ProgramError"} - {"PipelineError"}
    assert sorted(name for name, *_ in TABLE) == sorted(public)
    for name, when, *_ in TABLE:
        bases = {base.__name__ for base in getattr(pypipe, name).__bases__}
        for builtin in {"ValueError", "TypeError", "TimeoutError", "ArithmeticError"}:
            assert (builtin in bases) == (f"`{builtin}`" in when), f"{name} and {builtin}"


def _texts() -> Iterator[str]:
    """The strings of the package and the core, each in one piece; three dots for what is filled in."""
    for path in (ROOT / "pypipe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(each.value) if isinstance(each, ast.Constant) else "..." for each in node.values)
    for path in (ROOT / "csrc").rglob("*.?pp"):
        yield from re.findall(r'"([^"\\]*)"', re.sub(r'"\s*\n\s*"', "", path.read_text()))


def test_the_messages_of_the_table_are_in_the_code() -> None:
    texts = list(_texts())
    for name, _, example, _ in TABLE:
        messages = re.findall(r"`([^`]+)`", example)
        assert messages, name
        for message in messages:
            fixed = [part.strip(" ,'") for part in re.split(r"\.\.\.|PYPIPE_LINK='tcp'", message) if part.strip(" ,'")]
            assert any(all(part in text for part in fixed) for text in texts), f"{name}: {message}"
