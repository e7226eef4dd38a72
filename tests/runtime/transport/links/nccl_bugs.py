"""Bugs in the order of events, planted into the product's own calls: the emulator must see each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from compute_stream import ComputeStream
from models import make
from nccl_cases import compute_stream, control

import pypipe
from pypipe.runtime.transport.links import nccl


@contextlib.contextmanager
def _elsewhere(compute: ComputeStream) -> Iterator[None]:
    """Calls in here order their work against a stream that compute does not use."""
    with patch.object(nccl, "current_stream", lambda device: compute.other):
        yield


def _around(method: Any) -> Any:
    def planted(port: Any, *args: Any) -> Any:
        with _elsewhere(compute_stream()):
            return method(port, *args)

    return planted


_receive, _release, _send = nccl.NcclReceiveChannel.wait, nccl.NcclReceiveChannel.release, nccl.NcclSendChannel.transfer


def _receive_and_release(port: Any, tag: Any) -> Any:
    message = _receive(port, tag)
    _release(port, message)
    return message


def _send_and_forget(port: Any, *args: Any) -> None:
    _send(port, *args)
    port._leaving.clear()


BUGS: dict[str, list[tuple[Any, str, Any]]] = {
    "none": [],
    "no wait before a send": [(nccl.NcclSendChannel, "transfer", _around(_send))],
    "no wait before a use": [(nccl.NcclReceiveChannel, "wait", _around(_receive))],
    "a slot given back before its last use": [
        (nccl.NcclReceiveChannel, "wait", _receive_and_release),
        (nccl.NcclReceiveChannel, "release", lambda port, message: None),
    ],
    "a slot given back without its last reader's event": [(nccl.NcclReceiveChannel, "release", _around(_release))],
    "a tensor freed before it was sent": [(nccl.NcclSendChannel, "transfer", _send_and_forget)],
    "a tensor overwritten after the step": [(nccl.NcclSendChannel, "finish", lambda port: port._end_run())],
}


def reports(rank: int, size: int, group: Any, bug: str, schedule_name: str, seeds: list[int]) -> list[list[str]]:
    """For each seed, what was reported during three steps and evals."""
    emulator, compute = control(), compute_stream()
    found = []
    for seed in seeds:
        emulator.reset_counters()
        emulator.set("seed", seed * 64 + rank)
        with contextlib.ExitStack() as stack:
            for where, name, value in BUGS[bug]:
                stack.enter_context(patch.object(where, name, value))
            stack.enter_context(compute.installed())
            modules, batch, loss = make("mlp", size)
            stage = pypipe.PipelineStage(modules[rank], rank, size, torch.device("cpu"), group=group)
            schedule = getattr(pypipe, schedule_name)(stage, n_microbatches=6, loss_fn=loss, timeout=30)
            x, y = batch(12)
            for _ in range(3):
                schedule.step(x, target=y)
                schedule.eval(x)
            schedule.close()
        emulator.settle(compute.handle)
        found.append([emulator.last_report()] if emulator.hazards() else [])
    return found
