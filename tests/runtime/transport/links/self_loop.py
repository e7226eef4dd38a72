"""The NCCL link within one process: what goes out comes back, over a communicator of one rank.

A send to oneself needs its receive in the same NCCL group, so this is the path of one communicator for a pair of ranks
(csrc/link/nccl/nccl_group.hpp), and all that one GPU alone can show. On the emulator the same code runs on CPU tensors.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch
from models import make, twins, unpipelined
from transparency import difference

from pypipe import _core
from pypipe.program import Kind
from pypipe.runtime import libraries
from pypipe.runtime.batch.batch import Batch, ChunkSpecs
from pypipe.runtime.step.stage_execution import StageExecution
from pypipe.runtime.transport.links.nccl import Memory, NcclReceiveChannel, NcclSendChannel


class SelfLoop:
    """Two ends of a pipeline in one process, an edge from the process to itself, and channels over it."""

    def __init__(self, device: torch.device, timeout: float = 30.0) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.empty(1, device=device)  # makes the device's context current
        self.device = device
        self.wait_policy = _core.WaitPolicy(timeout)
        self.hubs = (_core.Hub(0), _core.Hub(1))
        for hub, end, peer in zip(self.hubs, socket.socketpair(), (1, 0), strict=True):
            end.setblocking(False)
            hub.add_peer(peer, end.detach())
        for hub in self.hubs:
            hub.start()
        nccl = libraries.nccl()
        edges = _core.NcclEdges(libraries.gpu(device.index or 0), nccl)
        self.edge = edges.add(nccl.unique_id(), 0, _core.NcclDirection.TO_ITSELF, "pypipe self", 4)
        edges.connect(self.wait_policy)
        self.group = _core.NcclGroup()
        self.watchdog = _core.NcclWatchdog(self.hubs[0], edges, timeout, 1)
        self._memory = Memory(device)
        self._links: list[Any] = []
        self._senders: list[NcclSendChannel] = []

    def channel(
        self, slots: int, stage: int = 0, kind: Kind = Kind.F, *, backwards: bool = False
    ) -> tuple[NcclSendChannel, NcclReceiveChannel]:
        """The two ends of a new channel on a link of its own."""
        number = len(self._links)
        here, there = reversed(self.hubs) if backwards else self.hubs
        allocate = self._memory.allocate
        send_link = _core.NcclSendLink(here, there_rank(backwards), number, self.edge, allocate, self.group)
        receive_link = _core.NcclReceiveLink(
            there, here_rank(backwards), number, self.edge, allocate, [(number, slots)], self.group
        )
        self._links.append((send_link, receive_link))
        sender = _core.ChannelSender(here, send_link, there_rank(backwards), number, slots)
        receiver = _core.ChannelReceiver(there, receive_link, here_rank(backwards), number, slots)
        outgoing = NcclSendChannel(self.device, sender, self.wait_policy, stage, kind)
        outgoing.held_back = True
        self._senders.append(outgoing)
        return (
            outgoing,
            NcclReceiveChannel(self._memory, self.device, receiver, self.wait_policy, stage, kind),
        )

    def issue(self) -> None:
        """What was sent and posted goes out."""
        self.group.issue(self.wait_policy)
        for sender in self._senders:
            sender.issued()

    def close(self) -> None:
        """Takes the communicator and the sockets down."""
        self.watchdog.close(self.wait_policy)
        for hub in self.hubs:
            hub.close()


def here_rank(backwards: bool) -> int:
    """The rank that sends."""
    return int(backwards)


def there_rank(backwards: bool) -> int:
    """The rank that receives."""
    return int(not backwards)


def train(device: torch.device, model: str, n_stages: int, n_microbatches: int, rows: int, steps: int = 2) -> list[str]:
    """GPipe over so many stages in this process; returns what differs from the model without a pipeline, in words."""
    modules, make_batch, loss_fn = make(model, n_stages)
    for module in modules:
        module.to(device)
    reference = twins(modules)
    loop = SelfLoop(device)
    try:
        stages = _stages(loop, modules, loss_fn, n_microbatches)
        found: list[str] = []
        for _ in range(steps):
            x, y = (tensor.to(device) for tensor in make_batch(rows))
            _step(loop, stages, x, y, n_microbatches)
            loss_fn(unpipelined(reference, x), y).backward()
        for number, (module, other) in enumerate(zip(modules, reference, strict=True)):
            for (name, a), b in zip(module.named_parameters(), other.parameters(), strict=True):
                worst = difference(a.grad, b.grad)
                if not worst <= 1e-12:
                    found.append(f"{model}, {n_stages} stages, stage {number}: gradient of {name} differs by {worst:g}")
        return found
    finally:
        loop.close()


def _stages(loop: SelfLoop, modules: Sequence[Any], loss_fn: Any, n_microbatches: int) -> list[StageExecution]:
    last = len(modules) - 1
    forward = [loop.channel(n_microbatches, number, Kind.F) for number in range(last)]
    backward = [loop.channel(n_microbatches, number + 1, Kind.B, backwards=True) for number in range(last)]
    return [
        StageExecution(
            module,
            f"stage {number}",
            last=number == last,
            loss=loss_fn,
            scale_grads=True,
            splits=False,
            receive_forward=forward[number - 1][1] if number else None,
            send_forward=forward[number][0] if number < last else None,
            receive_backward=backward[number][1] if number < last else None,
            send_backward=backward[number - 1][0] if number else None,
        )
        for number, module in enumerate(modules)
    ]


def _step(loop: SelfLoop, stages: list[StageExecution], x: Any, y: Any, n_microbatches: int) -> None:
    batch = Batch((x,), {}, y, ChunkSpecs(), n_microbatches, first=True, training=True)
    for stage in stages:
        stage.begin(batch, 2 * n_microbatches, keep_results=False, with_loss=True)
    for microbatch in range(n_microbatches):
        for stage, after in zip(stages, [*stages[1:], None], strict=True):
            stage.forward(microbatch)
            if after is not None:
                after.receiver(Kind.F).post(microbatch)
                stage.send_forward(microbatch)
                loop.issue()
    for microbatch in reversed(range(n_microbatches)):
        for stage, before in reversed(list(zip(stages, [None, *stages[:-1]], strict=True))):
            stage.backward(microbatch)
            if before is not None:
                before.receiver(Kind.B).post(microbatch)
                stage.send_backward(microbatch)
                loop.issue()
    for stage in stages:
        stage.end_step()
    batch.finish()
    for stage in stages:
        stage.reset()
