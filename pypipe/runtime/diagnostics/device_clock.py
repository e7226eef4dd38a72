"""Times actions on an accelerator's own clock: their work runs there later than it is issued."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from pypipe.program import Action

__all__ = ["DeviceClock", "clock_for"]

_NANOSECONDS = 1e6  # in a millisecond


class DeviceClock:
    """Events on a device's current stream around the actions of one step, and what they say.

    What an action issues lies on the stream between its two events, and nothing else does: so the first event
    is reached when the stream is free and the message that the action waits for has come, and the second when the
    action's work is done.

    Args:
        device: of a type that has streams and events with times, such as cuda.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._module.synchronize(device)
        self._zero = time.monotonic_ns()
        self._first = self._mark()
        self._starts: list[Any] = []
        self._ends: list[Any] = []

    def begin(self) -> None:
        """An action begins to be issued."""
        self._starts.append(self._mark())

    def ready(self) -> None:
        """The stream waits for the message that the action uses: what comes now runs after it."""
        self._starts[-1] = self._mark()

    def end(self) -> None:
        """The action has been issued."""
        self._ends.append(self._mark())

    def times(self, actions: Sequence[Action]) -> dict[Action, tuple[int, int]]:
        """Start and end of each action, in nanoseconds of the host's CLOCK_MONOTONIC; waits until they are over.

        Args:
            actions: those that were issued, in their order; of one that is there more than once, the last counts.
        """
        self._module.synchronize(self._device)
        return {
            action: (self._at(start), self._at(end))
            for action, start, end in zip(actions, self._starts, self._ends, strict=True)
        }

    def _mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def _at(self, event: Any) -> int:
        milliseconds: float = self._first.elapsed_time(event)
        return self._zero + round(milliseconds * _NANOSECONDS)


def clock_for(device: torch.device) -> DeviceClock | None:
    """A device's own clock; None where actions are done once they have been called, as on a CPU."""
    return None if device.type == "cpu" else DeviceClock(device)
