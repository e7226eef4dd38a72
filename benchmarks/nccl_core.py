"""One send and one receive after another through the core's NCCL link; no torch. nccl_host.py calls this.

    python benchmarks/nccl_core.py CORE MESSAGES CUDA NCCL

CORE is pypipe's compiled core (`pypipe._core.__file__`), which is loaded without the rest, so that a profiler which
slows a program down fifty times is done in seconds. CUDA and NCCL are the emulator's libraries, or those that do
nothing (idle_device.cpp). Both ends are in this process, over the two ends of one communicator and a pair of sockets.
Prints, as JSON, the nanoseconds of CPU time of a send and of a receive (post, receive and release) on the calling
thread, and of these the kernel's.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import json
import resource
import socket
import sys
import threading
import time
from typing import Any

BYTES = 4096
SLOTS = 32


class _Memory:
    """What the core asks of a tensor."""

    def __init__(self, size: int) -> None:
        self._bytes = ctypes.create_string_buffer(size)

    def data_ptr(self) -> int:
        return ctypes.addressof(self._bytes)


def main(path: str, messages: int, cuda_library: str, nccl_library: str) -> None:
    """Sends so many messages, in batches that fill the slots."""
    loader = importlib.machinery.ExtensionFileLoader("pypipe._core", path)
    spec = importlib.util.spec_from_loader("pypipe._core", loader)
    assert spec is not None
    core: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(core)
    wait_policy, kind = core.WaitPolicy(600.0), core.ActionKind.F.value
    hubs = core.Hub(0), core.Hub(1)
    for hub, end, peer in zip(hubs, socket.socketpair(), (1, 0), strict=True):
        end.setblocking(False)
        hub.add_peer(peer, end.detach())
        hub.start()
    (cuda, _), (nccl, _) = core.open_cuda(cuda_library), core.open_nccl(nccl_library, [])
    unique_id = nccl.unique_id()
    ends: dict[int, Any] = {}
    edges: dict[int, Any] = {}

    def join(rank: int) -> None:
        ends[rank] = core.NcclEdges(core.CudaGpu(cuda, 0), nccl)
        edges[rank] = ends[rank].add(unique_id, rank, core.NcclDirection.ONE_WAY, "pypipe", 4)
        ends[rank].connect(wait_policy)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    send_link = core.NcclSendLink(hubs[0], 1, 0, edges[0], _Memory, None)
    receive_link = core.NcclReceiveLink(hubs[1], 0, 0, edges[1], _Memory, [(0, SLOTS)], None)
    sender = core.ChannelSender(hubs[0], send_link, 1, 0, SLOTS)
    receiver = core.ChannelReceiver(hubs[1], receive_link, 0, 0, SLOTS)
    layout = sender.announce("{}", [BYTES], 0, wait_policy)
    tensor, stream = _Memory(BYTES).data_ptr(), 0
    spent = {"send": [0.0, 0.0], "receive": [0.0, 0.0]}
    pause = 0.02 if messages < 10_000 else 0.003  # a profiler makes everything slow
    for _ in range(messages // SLOTS):
        begun = _used()
        for microbatch in range(SLOTS):
            sender.send(layout, 0, kind, microbatch, False, 1, SLOTS, [tensor], stream, wait_policy)
            sender.sent()
        _add(spent["send"], begun)
        time.sleep(pause)  # until all has been announced: what is counted below is no waiting
        begun = _used()
        for _ in range(SLOTS):
            receiver.post(stream, wait_policy)
        _add(spent["receive"], begun)
        time.sleep(pause)  # until all has arrived
        begun = _used()
        for microbatch in range(SLOTS):
            receiver.release(receiver.receive(0, kind, microbatch, False, stream, wait_policy), stream)
        _add(spent["receive"], begun)
    for hub in hubs:
        hub.close()
    count = messages // SLOTS * SLOTS
    print(json.dumps({end: {"all": a / count * 1e9, "kernel": k / count * 1e9} for end, (a, k) in spent.items()}))


def _used() -> tuple[float, float]:
    return time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_stime


def _add(spent: list[float], begun: tuple[float, float]) -> None:
    for place, (now, before) in enumerate(zip(_used(), begun, strict=True)):
        spent[place] += now - before


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
