"""1F1B wired by hand for one host, with no library: the floor that a library is measured against.

What somebody who needs one fixed pipeline would write: per boundary and direction a ring of buffers in
shared memory and a counting semaphore (a futex). A message is one copy, by the sender, into the
receiver's buffer, and the received tensor is that buffer. No credits flow back, because 1F1B's own order
implies them: rank i sends F of microbatch m only after B of m - (P - i) came back, so P - i buffers
suffice, in both directions. No shapes are negotiated, no message is tagged, and a failure elsewhere shows
only as a timeout.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.context import SpawnContext
from typing import Any

import torch
from torch import Tensor, nn

TIMEOUT = 60.0  # seconds


class Edge:
    """One direction of one boundary between two ranks: float32 messages of one shape, in order."""

    def __init__(self, context: SpawnContext, buffers: int, shape: tuple[int, ...]) -> None:
        self.buffers, self.shape = buffers, shape
        self.filled = context.Semaphore(0)
        # memfd rather than a file in /dev/shm, which containers often limit to 64 MB: less than this needs.
        self.descriptor = os.memfd_create("handwired")
        os.ftruncate(self.descriptor, 4 * buffers * torch.Size(shape).numel())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "descriptor": reduction.DupFd(self.descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, descriptor=state["descriptor"].detach())

    def open(self) -> None:
        memory = torch.frombuffer(mmap.mmap(self.descriptor, 0), dtype=torch.float32)
        self.ring = memory.view(self.buffers, *self.shape).unbind()

    def send(self, m: int, tensor: Tensor) -> None:
        self.ring[m % self.buffers].copy_(tensor)
        self.filled.release()

    def receive(self, m: int) -> Tensor:
        if not self.filled.acquire(timeout=TIMEOUT):
            raise TimeoutError(f"microbatch {m} did not arrive")
        return self.ring[m % self.buffers].detach()


Boundary = tuple[Edge, Edge]  # activations to the next rank, gradients back


def make_boundaries(context: SpawnContext, P: int, M: int, shape: tuple[int, ...]) -> list[Boundary]:
    """The boundaries after rank 0, 1, ..., P - 2, for the parent to hand to every rank it spawns."""
    sizes = [min(M, P - rank) for rank in range(P - 1)]
    return [(Edge(context, size, shape), Edge(context, size, shape)) for size in sizes]


class HandwiredPipeline:
    """This rank's stage in the 1F1B loop."""

    def __init__(
        self,
        module: nn.Module,
        rank: int,
        P: int,
        M: int,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        boundaries: list[Boundary],
    ) -> None:
        self.module, self.M, self.loss_fn = module, M, loss_fn
        self.parameters = list(module.parameters())
        self.warmup = min(M, P - rank - 1)
        self.before = boundaries[rank - 1] if rank > 0 else None
        self.after = boundaries[rank] if rank < P - 1 else None
        for edge in (*(self.before or ()), *(self.after or ())):
            edge.open()
        self.alive: deque[tuple[Tensor, Tensor]] = deque()
        self.losses: list[Tensor] = []

    def step(self, x: Tensor, y: Tensor) -> list[Tensor]:
        self.x = x.chunk(self.M) if self.before is None else ()
        self.y = y.chunk(self.M) if self.after is None else ()
        self.losses = []
        for m in range(self.warmup):
            self.forward(m)
        for m in range(self.M - self.warmup):
            self.forward(m + self.warmup)
            self.backward(m)
        for m in range(self.M - self.warmup, self.M):
            self.backward(m)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self.M)
        return self.losses

    def forward(self, m: int) -> None:
        x = self.x[m] if self.before is None else self.before[0].receive(m).requires_grad_()
        out = self.module(x)
        if self.after is None:
            out = self.loss_fn(out, self.y[m])
            self.losses.append(out.detach())
        else:
            self.after[0].send(m, out.detach())
        self.alive.append((x, out))

    def backward(self, m: int) -> None:
        x, out = self.alive.popleft()
        torch.autograd.backward(out, None if self.after is None else self.after[1].receive(m))
        if self.before is not None:
            assert x.grad is not None
            self.before[1].send(m, x.grad)

    def close(self) -> None:
        pass
