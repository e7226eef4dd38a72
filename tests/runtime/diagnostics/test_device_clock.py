"""A device's clock, on a double of torch's accelerator modules: a stream is a time up to which it is busy."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from pypipe.program import Action
from pypipe.runtime.diagnostics.device_clock import DeviceClock, clock_for


class Device:
    """What torch.cuda is to a program, in milliseconds of its own."""

    def __init__(self) -> None:
        self.busy_until = 500.0
        self.synchronized = 0

        class Event:
            def __init__(event, *, enable_timing: bool) -> None:
                assert enable_timing
                event.at: float | None = None

            def record(event, stream: object) -> None:
                assert stream is self
                event.at = self.busy_until

            def elapsed_time(event, later: Any) -> float:
                assert self.synchronized == 2, "the events may not have happened yet"
                return float(later.at - event.at)

        self.Event = Event

    def current_stream(self, device: torch.device) -> Device:
        assert device.type == "cuda"
        return self

    def synchronize(self, device: torch.device) -> None:
        self.synchronized += 1

    def work(self, milliseconds: float) -> None:
        self.busy_until += milliseconds

    wait = work


def test_an_action_s_work_is_timed_without_the_wait_for_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    before = time.monotonic_ns()
    clock = DeviceClock(torch.device("cuda", 1))
    after = time.monotonic_ns()
    for waits, works in ((None, 2.0), (3.0, 4.0), (0.0, 1.0)):
        clock.begin()
        if waits is not None:
            device.wait(waits)
            clock.ready()
        device.work(works)
        clock.end()
    f0, send, f1 = map(Action.parse, ("0F0", "0SEND_F0", "0F1"))
    times = clock.times([f0, send, f1])
    zero = times[f0][0]
    assert before <= zero <= after
    assert {action: (start - zero, end - zero) for action, (start, end) in times.items()} == {
        f0: (0, 2_000_000),
        send: (5_000_000, 9_000_000),
        f1: (9_000_000, 10_000_000),
    }


def test_a_cpu_needs_no_clock_of_its_own() -> None:
    assert clock_for(torch.device("cpu")) is None
