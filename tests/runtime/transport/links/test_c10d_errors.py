"""A peer's death reaches the backend and the hub in any order: what the hub says is told, whichever comes first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pypipe import _core
from pypipe.errors import PipelineError
from pypipe.runtime.transport.links.c10d_transfers import Completion, as_pipeline_error


class _Hub:
    """Knows of the peer's death when it is asked for the third time, or never."""

    rank = 0

    def __init__(self, *, learns: bool) -> None:
        self._learns = learns
        self.asked = 0
        self.aborts: list[str] = []

    def check(self, peer: int) -> None:
        self.asked += 1
        if self._learns and self.asked >= 3:
            raise _core.CoreError(f"rank {peer} is gone")

    def abort(self, cause: str) -> None:
        self.aborts.append(cause)


def _route(hub: _Hub) -> Any:
    return SimpleNamespace(hub=hub, peer=1, wait_policy=_core.WaitPolicy(5.0))


def _failed(hub: _Hub) -> Any:
    completion = Completion()
    completion.fail(RuntimeError("connection reset"))
    completion.done.set()
    return completion


def test_the_hubs_word_comes_before_the_backends_also_when_it_comes_later() -> None:
    hub = _Hub(learns=True)
    with pytest.raises(_core.CoreError, match="rank 1 is gone"):
        _failed(hub).wait(_route(hub), "sending to")
    with pytest.raises(_core.CoreError, match="rank 1 is gone"), as_pipeline_error("sending to", _route(hub)):
        raise RuntimeError("connection reset")


def test_a_send_that_fails_in_the_background_does_not_abort_over_a_death_that_the_hub_learns_of() -> None:
    hub = _Hub(learns=True)
    completion = Completion()
    completion.route = _route(hub)
    completion.fail(RuntimeError("connection reset"))
    assert hub.aborts == []


def test_where_the_hub_knows_nothing_the_backends_error_is_told() -> None:
    hub = _Hub(learns=False)
    with pytest.raises(PipelineError, match="connection reset"):
        _failed(hub).wait(_route(hub), "sending to")
