"""When a stage gives back what it received."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pypipe.program import build, lower
from pypipe.runtime.batch.batch import Batch, ChunkSpecs
from pypipe.runtime.diagnostics.recorder import Recorder
from pypipe.runtime.step.executor import Executor
from pypipe.runtime.step.stage_execution import StageExecution
from pypipe.runtime.transport.inputs import Inputs


class _Input:
    """A received activation, which notes when it is given back."""

    rows, batch_rows = 1, 2

    def __init__(self, events: list[str], microbatch: int) -> None:
        leaf = torch.ones(1, 3, requires_grad=True)
        self.tree: Any = leaf * 1
        self.leaves = [leaf]
        self._events = events
        self._microbatch = microbatch

    def holds(self, tensor: Tensor) -> bool:
        return False

    def after_forward(self) -> None: ...

    def changed_shared(self) -> None: ...

    def give_back(self) -> None:
        self._events.append(f"release {self._microbatch}")


class _Channels:
    """Both channels of a last stage."""

    posts = False

    def __init__(self, room: bool) -> None:
        self.events: list[str] = []
        self._room = room

    def inputs(self) -> Inputs:
        return Inputs(cast(Any, self))

    def receive(self, microbatch: int, *, training: bool) -> _Input:
        return _Input(self.events, microbatch)

    def has_room(self) -> bool:
        return self._room

    def send(self, gradient: Tensor, microbatch: int, rows: int, batch_rows: int) -> None:
        self.events.append(f"send {microbatch}")


def _last_stage(channels: _Channels) -> StageExecution:
    stage = StageExecution(
        nn.Linear(3, 3),
        "rank 1, stage 1",
        last=True,
        loss=lambda output, target: output.sum(),
        scale_grads=True,
        splits=False,
        receive_forward=cast(Any, channels),
        send_forward=None,
        receive_backward=None,
        send_backward=cast(Any, channels),
    )
    stage.receiver = lambda kind: cast(Any, channels)  # type: ignore[method-assign]
    batch = Batch((), {}, torch.ones(2, 1), ChunkSpecs(), 2, first=False, training=True)
    stage.begin(batch, 2, keep_results=False, with_loss=True)
    return stage


@pytest.mark.parametrize(
    ("room", "expected"),
    [(True, ["send 0", "release 0", "send 1", "release 1"]), (False, ["release 0", "send 0", "release 1", "send 1"])],
)
def test_a_slot_goes_back_after_the_gradient_unless_that_may_have_to_wait_for_it(
    room: bool, expected: list[str]
) -> None:
    channels = _Channels(room)
    stage = _last_stage(channels)
    program = lower(build("1f1b", 2, 2))
    executor = Executor(program, 1, {1: stage}, Recorder(1))
    executor.run()
    assert channels.events == expected


def test_a_slot_goes_back_at_once_where_the_gradient_is_sent_later() -> None:
    channels = _Channels(room=True)
    stage = _last_stage(channels)
    for microbatch in range(2):
        stage.forward(microbatch)
        stage.backward(microbatch)
    for microbatch in range(2):
        stage.send_backward(microbatch)
    assert channels.events == ["release 0", "release 1", "send 0", "send 1"]
