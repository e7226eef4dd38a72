"""What the commands have in common: how they refuse input, and how they print.

A module of this package is a command if it has a click command by the name `command` (see cli.py). What a command needs
beyond click, the standard library and what imports no torch is imported as it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import click
from rich.console import Console

__all__ = ["BadInput", "json_option", "rendered"]

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object, nothing else.")
"""Adds `--json`. With it a command prints the object and nothing else to the standard output."""


class BadInput(click.ClickException):
    """The command cannot do what it was asked for: one line on stderr, and the exit code of click's own complaints."""

    exit_code = 2


def rendered(draw: Callable[[Console], None], width: int) -> str:
    """What is drawn on a console, as text for the terminal that is there.

    Args:
        draw: prints on the console that it is given.
        width: columns, where the standard output is no terminal and COLUMNS is not set.

    Returns:
        Lines without spaces at their ends, nor a last newline.
    """
    is_narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if is_narrow else width)
    with console.capture() as capture:
        draw(console)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
