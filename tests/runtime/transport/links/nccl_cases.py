"""Training over the NCCL link, on the emulated driver and NCCL; CPU tensors are the device's memory."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from typing import Any
from unittest.mock import patch

import cuda_emulator
import self_loop
import static_cases
import torch
import torch.distributed as dist
import transparency
from compute_stream import ComputeStream
from models import make, twins, unpipelined
from torch import nn

import pypipe
from pypipe.program import Channel, Kind, Link
from pypipe.runtime.rendezvous.config import Config
from pypipe.runtime.rendezvous.world import find_world
from pypipe.runtime.transport.channel import Tag
from pypipe.runtime.transport.connection import Connection, connect
from pypipe.runtime.transport.links import nccl


@functools.cache
def control() -> Any:
    """The emulator's control functions; the libraries are built already."""
    return cuda_emulator.Control(cuda_emulator.build())


@functools.cache
def compute_stream() -> ComputeStream:
    """This process's compute."""
    return ComputeStream(control(), os.environ["PYPIPE_CUDA_LIBRARY"])


def hazards(emulator: Any, rank: int) -> list[str]:
    count = emulator.hazards()
    return [f"rank {rank}: {count} hazards, the last: {emulator.last_report()}"] if count else []


def seeds(rank: int, size: int, group: Any, cases: list[tuple[int, transparency.Case]]) -> list[str]:
    """For each seed and case: what differs from the unpipelined model, and what was reported."""
    emulator, compute = control(), compute_stream()
    found: list[str] = []
    for seed, case in cases:
        emulator.reset_counters()
        emulator.set("seed", seed * 64 + rank)
        with compute.installed():
            found += transparency.compare(rank, size, group, *case, timeout=120)
        emulator.settle(compute.handle)
        found += hazards(emulator, rank)
        if found:
            return [f"seed {seed}, {case}: {text}" for text in found]
    return found


def few_places(
    rank: int, size: int, group: Any, communicators: str, cases: list[tuple[int, transparency.Case]]
) -> list[str]:
    """The same where a device holds one NCCL kernel of each communicator, and no send ends before its receive."""
    emulator, compute = control(), compute_stream()
    found: list[str] = []
    connect = nccl.NcclTransport.connect

    def connect_and_limit(transport: nccl.NcclTransport) -> None:
        connect(transport)
        emulator.set("resident", max(len(transport._edge_of), 1))

    with (
        patch.dict(os.environ, PYPIPE_NCCL_COMMUNICATORS=communicators),
        patch.object(nccl.NcclTransport, "connect", connect_and_limit),
        compute.installed(),
    ):
        for seed, case in cases:
            emulator.reset_counters()
            emulator.set("seed", seed * 64 + rank)
            emulator.set("staging", 0)
            try:
                found += transparency.compare(rank, size, group, *case, timeout=30)
            except pypipe.PipelineError as error:
                found.append(f"{type(error).__name__}: {error}")
            finally:
                emulator.set("resident", 32)
                emulator.set("staging", 65536)
            emulator.settle(compute.handle)
            found += hazards(emulator, rank)
            if found:
                return [f"seed {seed}, {case}: {text}" for text in found]
    return found


def changing_layouts(rank: int, size: int, group: Any, seed: int) -> list[str]:
    """Batches and sequences of other lengths, evaluations between them; compared after each step."""
    emulator, compute = control(), compute_stream()
    emulator.reset_counters()
    emulator.set("seed", seed * 64 + rank)
    modules, _, loss_fn = make("gpt", size, seed)
    reference = twins(modules)
    found: list[str] = []
    with compute.installed():
        stage = pypipe.PipelineStage(modules[rank], rank, size, torch.device("cpu"), group=group)
        schedule = pypipe.Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn, timeout=30)
        for rows, length in [(8, 5), (8, 5), (5, 5), (8, 9), (4, 2), (11, 40), (8, 5)]:
            x, y = torch.randint(11, (rows, length)), torch.randint(11, (rows, length))
            schedule.step(x, target=y)
            loss_fn(unpipelined(reference, x), y).backward()
            for (name, a), b in zip(modules[rank].named_parameters(), reference[rank].parameters(), strict=True):
                worst = transparency.difference(a.grad, b.grad)
                if not worst <= transparency.TOLERANCE:
                    found.append(f"rank {rank}, {rows} x {length}: the gradient of {name} differs by {worst:g}")
            evaluated = schedule.eval(x[:4, :2])
            if evaluated is not None and not torch.allclose(evaluated, unpipelined(reference, x[:4, :2])):
                found.append(f"rank {rank}, {rows} x {length}: an evaluation differs")
        schedule.close()
    emulator.settle(compute.handle)
    return found + hazards(emulator, rank)


def to_itself(rank: int, size: int, group: Any, model: str, n_stages: int) -> list[str]:
    """As tests/gpu, on the emulator."""
    emulator = control()
    emulator.reset_counters()
    return self_loop.train(torch.device("cpu"), model, n_stages, 4, 10) + hazards(emulator, rank)


def steady_state(
    rank: int, size: int, group: Any
) -> tuple[int, int, dict[Any, dict[str, int]], dict[Any, dict[str, int]]]:
    """Host synchronizations and device allocations during three steps after the first, and counters around them."""
    emulator = control()
    modules, batch, loss = make("mlp", size)
    stage = pypipe.PipelineStage(modules[rank], rank, size, torch.device("cpu"), group=group)
    schedule = pypipe.Schedule1F1B(stage, n_microbatches=6, loss_fn=loss, timeout=30)
    x, y = batch(12)
    schedule.step(x, target=y)
    schedule.step(x, target=y)
    before = {str(channel): counted for channel, counted in schedule.counters.items()}
    emulator.reset_counters()
    for _ in range(3):
        schedule.step(x, target=y)
    counts = emulator.host_synchronizations(), emulator.allocations()
    after = {str(channel): counted for channel, counted in schedule.counters.items()}
    schedule.close()
    return *counts, before, after


def dies(rank: int, size: int, group: Any, what: str) -> str:
    """A fault on rank 1 in the middle of a step; returns what this rank raised."""
    emulator = control()
    stage = pypipe.PipelineStage(nn.Linear(4, 4).double(), rank, size, torch.device("cpu"), group=group)
    schedule = pypipe.Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss, timeout=20)
    x = torch.randn(8, 4, dtype=torch.float64)
    # A transfer that hangs is to be told by the watchdog, before any host that waits gives up.
    limit = 1.0 if what == "hang" else 60.0
    with patch.object(nccl, "_transfer_limit", lambda timeout: limit):
        schedule.step(x, target=x)
    if rank == 1:
        emulator.fault(f"{what}@{emulator.operations() + 3}")
    try:
        for _ in range(3):
            schedule.step(x, target=x)
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        emulator.fault("")
        schedule.close()
        emulator.reset_counters()
    return "nothing was raised"


def beside_an_empty_one(rank: int, size: int, group: Any) -> list[str]:
    """A message of a tensor of 10 bytes and an empty one, whose place in the message begins at byte 64."""
    emulator = control()
    emulator.reset_counters()
    driver = ctypes.CDLL(os.environ["PYPIPE_CUDA_LIBRARY"])
    memory = ctypes.c_uint64()
    assert driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(10)) == 0  # whose bounds the emulator knows
    tensor = torch.frombuffer((ctypes.c_char * 10).from_address(memory.value), dtype=torch.uint8).fill_(7)
    loop = self_loop.SelfLoop(torch.device("cpu"))
    try:
        sender, receiver = loop.channel(2)
        tag = Tag(0, Kind.F.order, 0, 0, 0)
        layout = sender.announce("{}", [10, 0], 0)
        receiver.post(0)
        sender.transfer(layout, tag, [tensor, torch.empty(0, dtype=torch.uint8)])
        loop.issue()
        receiver.release(receiver.wait(tag))
        sender.finish()
    finally:
        loop.close()
    found = hazards(emulator, rank)
    emulator.reads(memory.value, 64, "a reader of too much")
    if emulator.hazards("bounds") == 0:
        found.append("the emulator saw nothing of a read that leaves the tensor")
    assert driver.cuMemFree_v2(memory) == 0
    emulator.reset_counters()
    return found


def _one_channel(group: Any, slots: int) -> tuple[Connection, Channel]:
    """A channel from rank 0 to rank 1."""
    channel = Channel(Kind.F, 0, 1)
    links = {channel: Link(Kind.F, 0, 1)}
    connection = connect(
        find_world(group), torch.device("cpu"), links, lambda _: {channel: slots}, Config(), lambda _: None, 20.0
    )
    return connection, channel


def one_buffer(rank: int, size: int, group: Any, waits: bool) -> tuple[list[str], list[str]]:
    """A stage that returns one buffer again and again, as a CUDA graph does: hazards, and warnings, in two runs.

    Args:
        waits: whether the channel does what it does about that.
    """
    emulator, compute = control(), compute_stream()
    emulator.reset_counters()
    buffer = torch.zeros(64)
    with (
        warnings.catch_warnings(record=True) as seen,
        patch.object(nccl, "current_stream", lambda device: compute.handle),
    ):
        warnings.simplefilter("always")
        connection, channel = _one_channel(group, slots=2)
        for _ in range(2):
            for microbatch in range(6):
                if rank == 0:
                    sender: Any = connection.senders[channel]
                    compute.writes(buffer.data_ptr(), 256, f"the graph of microbatch {microbatch}")
                    if not waits:
                        sender._seen, sender._reuses = {False, True}, False
                        sender._leaving.clear()
                    sender.send(buffer, microbatch, 1, 6)
                else:
                    receiver: Any = connection.receivers[channel]
                    receiver.post(microbatch)
                    receiver.receive(microbatch, training=False).give_back()
            if rank == 0:
                connection.senders[channel].finish()
        emulator.settle(compute.handle)
        dist.barrier(group)
        connection.close()
    return hazards(emulator, rank), [str(each.message) for each in seen]


def running_ahead(rank: int, size: int, group: Any, n_microbatches: int) -> tuple[int, list[str]]:
    """The most bytes of sent tensors that this rank kept alive in an eval(), after a first one."""
    emulator, compute = control(), compute_stream()
    emulator.reset_counters()
    transfer = nccl.NcclSendChannel.transfer
    most = 0

    def counted(port: Any, *args: Any) -> None:
        nonlocal most
        transfer(port, *args)
        kept = sum(t.numel() * t.element_size() for _, tensors in port._leaving for t in tensors)
        most = max(most, kept)

    with patch.object(nccl.NcclSendChannel, "transfer", counted), compute.installed():
        stage = pypipe.PipelineStage(nn.Linear(64, 64), rank, size, torch.device("cpu"), group=group)
        schedule = pypipe.ScheduleGPipe(stage, n_microbatches, timeout=30)
        x = torch.randn(n_microbatches, 64)
        schedule.eval(x)
        most = 0
        schedule.eval(x)
        schedule.close()
    emulator.settle(compute.handle)
    return most, hazards(emulator, rank)


def posts_before_anything_is_sent(rank: int, size: int, group: Any) -> list[str]:
    """With promised layouts: rank 1 posts the receives of its second run before rank 0 sends anything of it."""
    emulator, compute = control(), compute_stream()
    emulator.reset_counters()
    with patch.object(nccl, "current_stream", lambda device: compute.handle):
        connection, channel = _one_channel(group, slots=3)
        kept = []
        for run in range(3):
            for sender in connection.senders.values():
                sender.static = True
                sender.begin(2)
            for receives in connection.receivers.values():
                receives.static = True
                receives.begin(2)
            if rank == 0:
                if run:
                    dist.barrier(group)
                for microbatch in range(3):
                    values = torch.full((4 + microbatch,), float(10 * run + microbatch))
                    kept.append(values)  # no GPU's allocator is there to keep it for what the stream waits for
                    compute.writes(values.data_ptr(), 4 * values.numel(), "what made this tensor")
                    connection.senders[channel].send(values, microbatch, 1, 3)
                connection.senders[channel].finish()
            else:
                receiver: Any = connection.receivers[channel]
                for microbatch in range(3):
                    receiver.post(microbatch)
                if run:
                    dist.barrier(group)
                for microbatch in range(3):
                    lease = receiver.receive(microbatch, training=False)
                    emulator.settle(compute.handle)
                    assert lease.tree.tolist() == [float(10 * run + microbatch)] * (4 + microbatch)
                    lease.give_back()
        emulator.settle(compute.handle)
        dist.barrier(group)
        connection.close()
    return hazards(emulator, rank)


def static_shapes(rank: int, size: int, group: Any, name: str, seed: int) -> list[str]:
    """Steps and evals with promised layouts, microbatches of two lengths, over the emulator."""
    emulator, compute = control(), compute_stream()
    emulator.reset_counters()
    emulator.set("seed", seed * 64 + rank)
    with compute.installed():
        found = static_cases.train(rank, size, group, name)
    emulator.settle(compute.handle)
    return found + hazards(emulator, rank)
