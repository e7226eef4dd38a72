"""Which microbatch a stage's forward or backward is of, for what runs inside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Current", "current", "set_current"]


class Current(NamedTuple):
    """The microbatch that is computed now.

    Attributes:
        number: which one.
        total: M.
        rows: how many rows of the batch it has; None where the batch has none.
        weight: tells by how much its losses count in the batch's, scaled as gradients are.
    """

    number: int
    total: int
    rows: int | None
    weight: Callable[[], float]


class _Here(threading.local):
    now: Current | None = None


_here = _Here()
# Of the thread that set it last: autograd computes what is on an accelerator in threads of its own, which have none.
_anywhere: Current | None = None


def current() -> Current | None:
    """The microbatch that is computed now; None outside a stage."""
    return _here.now or _anywhere


def set_current(now: Current | None) -> None:
    """Says that from now on a microbatch is computed in this thread, or none."""
    global _anywhere
    _here.now = _anywhere = now
