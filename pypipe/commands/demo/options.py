"""What the demo is given: its options and its text, checked before a process starts or torch is imported."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from dataclasses import dataclass
from pathlib import Path

from pypipe.program import Program, build

#: Attention heads of the demo's GPT are this wide, so the model's width is a multiple of it.
HEAD_WIDTH = 16

#: What --trace writes, by the file's ending: a Chrome trace, a page, a picture.
TRACE_ENDINGS = (".json", ".html", ".svg")

# Plain Python modules that every CPython since 3.11 ships as source: some 600 KB of text.
_STDLIB_MODULES = (
    "argparse",
    "ast",
    "calendar",
    "csv",
    "dataclasses",
    "difflib",
    "inspect",
    "logging",
    "statistics",
    "subprocess",
    "textwrap",
    "typing",
)

# A run of a few hundred steps looks at less than this, and each rank holds the text as int64 tokens.
_MOST_CHARACTERS = 1_000_000


class DemoInputError(ValueError):
    """The demo was asked for something it cannot do; the message is one line that says what to do instead."""


@dataclass(frozen=True)
class Options:
    """What to train, and how.

    Args:
        stages: P, the number of rank processes; each holds a stage, or two where the schedule has two on a rank.
        schedule: the name of a registered schedule.
        microbatches: M, at most `batch`; it need not divide it.
        steps: optimizer steps.
        seed: fixes the weights and the batches.
        batch: sequences a step.
        context: characters a sequence.
        blocks: transformer blocks of the whole model, at least one a stage; None: 4, or as many as there are stages.
        width: size of the vectors between blocks, a multiple of HEAD_WIDTH.
    """

    stages: int = 4
    schedule: str = "1f1b"
    microbatches: int = 8
    steps: int = 60
    seed: int = 0
    batch: int = 32
    context: int = 64
    blocks: int | None = None
    width: int = 64

    @property
    def n_blocks(self) -> int:
        """Transformer blocks of the whole model."""
        return max(4, self.n_stages) if self.blocks is None else self.blocks

    @functools.cached_property
    def program(self) -> Program:
        """What is run."""
        try:
            return build(self.schedule, self.stages, self.microbatches)
        except ValueError as error:
            raise DemoInputError(str(error)) from error

    @property
    def n_stages(self) -> int:
        """S, the number of pieces that the model is cut into."""
        return len(self.program.chains[0].stages)

    def check(self) -> None:
        """Raises DemoInputError for options that no run could follow."""
        for name in ("stages", "microbatches", "steps", "batch", "context", "blocks", "width"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise DemoInputError(f"--{name} is {number}: give at least 1")
        if not 0 <= self.seed < 2**32:
            raise DemoInputError(f"--seed is {self.seed}: give a number from 0 to {2**32 - 1}")
        if self.n_stages > self.n_blocks:
            raise DemoInputError(
                f"{self.n_stages} stages cannot share {self.blocks} blocks, as each needs one of its own: "
                f"lower --stages, or give --blocks {self.n_stages}"
            )
        if self.microbatches > self.batch:
            raise DemoInputError(
                f"a batch of {self.batch} sequences cannot be cut into {self.microbatches} microbatches: "
                f"lower --microbatches, or give --batch {self.microbatches}"
            )
        if self.width % HEAD_WIDTH:
            raise DemoInputError(f"--width is {self.width}: give a multiple of {HEAD_WIDTH}, the width of one head")


def check_trace(path: Path) -> None:
    """Raises DemoInputError for a file that no trace could be written into."""
    if path.suffix not in TRACE_ENDINGS:
        raise DemoInputError(f"--trace is {path}: give a file that ends in {', '.join(TRACE_ENDINGS)}")
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise DemoInputError(f"cannot write {path}: give --trace a file that can be written")


def read_text(path: Path | None, context: int) -> str:
    """Returns the training text: the start of a UTF-8 file, or source of Python's standard library.

    Args:
        path: the file, or None for the standard library.
        context: characters a sequence; the text must hold at least one sequence and the character after it.

    Raises:
        DemoInputError: the file cannot be read, is not UTF-8, or is too short.
    """
    if path is None:
        return _standard_library()[:_MOST_CHARACTERS]
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read(_MOST_CHARACTERS)
    except OSError as error:
        raise DemoInputError(f"cannot read {path} ({error.strerror}): give --text a readable file") from error
    except UnicodeDecodeError as error:
        raise DemoInputError(f"{path} is not UTF-8 at byte {error.start}: give --text a UTF-8 file") from error
    if len(text) <= context:
        raise DemoInputError(
            f"{path} has {len(text)} characters, and one sequence with its target takes {context + 1}: "
            "give a longer file, or lower --context"
        )
    return text


def _standard_library() -> str:
    try:
        return "\n".join(inspect.getsource(importlib.import_module(name)) for name in _STDLIB_MODULES)
    except OSError as error:
        raise DemoInputError("this Python comes without its library's source: give --text FILE") from error
