"""What `pypipe bench` makes of the times that it takes, on a clock of its own."""

from __future__ import annotations

import pytest

from pypipe.commands import bench

MESSAGE = 2.0  # seconds that each message takes from one end to the other


class _Clock:
    """Goes on by a message's time when one is sent or waited for: one after the other, none at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("pypipe.commands.bench.time.perf_counter", lambda: self.now)

    def message(self) -> None:
        self.now += MESSAGE


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("count", [1, 5])
def test_a_stream_and_a_round_trip_are_divided_by_the_messages_that_cross(
    monkeypatch: pytest.MonkeyPatch, first: bool, count: int
) -> None:
    clock = _Clock(monkeypatch)
    assert bench._stream(clock.message, clock.message, first, count) == MESSAGE
    assert clock.now == (count + 1) * MESSAGE  # the last one goes back
    assert bench._round_trips(clock.message, clock.message, first, count) == [2 * MESSAGE] * count


def test_a_figure_is_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)

    class End:
        def ready(self, size: int) -> tuple[object, object]:
            return clock.message, clock.message

    (figure,) = bench._measure_pair(End(), True, [1 << 20])  # type: ignore[arg-type]
    assert figure == bench.Figure(1 << 20, MESSAGE * 1e6, (1 << 20) / MESSAGE / 1e9)
