"""`pypipe demo`: a small GPT, trained in a pipeline of processes on this machine."""

from pypipe.commands.demo.cli import command

__all__ = ["command"]
