"""The `pypipe` command: finds the modules of this package that are commands, and imports the one that is asked for."""

from __future__ import annotations

import importlib
import pkgutil

import click

import pypipe.commands


class _Commands(click.Group):
    """Each module or package of pypipe.commands that has a click command by the name `command`."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Their names, in alphabetical order."""
        names = sorted(module.name for module in pkgutil.iter_modules(pypipe.commands.__path__))
        return [name for name in names if self.get_command(context, name) is not None]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """The command of one module; None if there is no such module, or it is not a command."""
        if name not in {module.name for module in pkgutil.iter_modules(pypipe.commands.__path__)}:
            return None
        command = getattr(importlib.import_module(f"pypipe.commands.{name}"), "command", None)
        return command if isinstance(command, click.Command) else None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="pypipe")
def main() -> None:
    """Pipeline-parallel training for PyTorch."""
