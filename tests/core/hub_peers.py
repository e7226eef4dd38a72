"""Both ends of control sockets: a peer that the test plays by hand, frames as bytes, chains of hubs."""

from __future__ import annotations

import array
import contextlib
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pypipe import _core

LONG = 30.0
WAIT_POLICY = _core.WaitPolicy(LONG)
HEADER = struct.Struct("=IHHIIQ")
MAGIC = 0x31507950
LAYOUT, MEMORY, ENVELOPE, ABORT, LEAVE = 1, 2, 3, 4, 5


def frame(kind: int, payload: bytes = b"", channel: int = 0, value: int = 0, *, length: int | None = None) -> bytes:
    """A frame as csrc/control/frame.cpp writes it; `length` is what its header claims."""
    return HEADER.pack(MAGIC, kind, 0, channel, len(payload) if length is None else length, value) + payload


def frames(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """The whole frames that a byte stream holds, as (type, payload), and the rest."""
    found = []
    at = 0
    while at + HEADER.size <= len(data):
        magic, kind, reserved, _, length, _ = HEADER.unpack_from(data, at)
        assert (magic, reserved) == (MAGIC, 0), f"no frame at byte {at} of {len(data)}"
        assert length <= 1 << 20
        if at + HEADER.size + length > len(data):
            break
        found.append((kind, data[at + HEADER.size : at + HEADER.size + length]))
        at += HEADER.size + length
    return found, data[at:]


def read_frame(connection: socket.socket) -> tuple[int, bytes] | None:
    """The next frame; None where the connection ends."""

    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = connection.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    try:
        header = HEADER.unpack(exactly(HEADER.size))
        return header[1], exactly(header[4])
    except (EOFError, ConnectionError):
        return None


def envelope(microbatch: int = 0) -> Any:
    return _core.Envelope(0, _core.ActionKind.F.value, microbatch, 1, False, 64, 2, 4)


def sockets(kind: str) -> tuple[socket.socket, socket.socket]:
    """Two ends of one connection."""
    if kind == "unix":
        a, b = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            a = socket.create_connection(server.getsockname())
            b, _ = server.accept()
    for end in (a, b):
        end.settimeout(LONG)
    return a, b


class Neighbours:
    """A hub of rank 1 between the test, which plays rank 0 by hand, and a good hub of rank 2."""

    def __init__(self, kind: str = "unix") -> None:
        self.raw, theirs = sockets(kind)
        mine, other = sockets("unix")
        self.hub = _core.Hub(1)
        self.hub.add_peer(0, theirs.detach())
        self.hub.add_peer(2, mine.detach())
        self.good = _core.Hub(2)
        self.good.add_peer(1, other.detach())
        self.hub.start()
        self.good.start()

    def close(self) -> None:
        self.raw.close()
        self.hub.close()
        self.good.close()


def failure(message: str, rank: int = 0) -> _core.Cause:
    """A cause, as of an exception with this message on that rank."""
    return _core.Cause(_core.CauseKind.ERROR, rank, message=message)


def cause_of(hub: Any, peer: int) -> _core.Cause:
    """The first cause, as soon as the hub has one."""
    with pytest.raises(_core.CoreError) as caught:
        hub.take_envelope(peer, 12345, WAIT_POLICY)
    assert caught.value.fault == "aborted", caught.value
    cause = hub.cause()
    assert isinstance(cause, _core.Cause)
    return cause


def send_all(connection: socket.socket, data: bytes) -> None:
    """Sends, to a peer that may hang up in the middle of it."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def until_hung_up(connection: socket.socket) -> Iterator[None]:
    """Sends until the hub hangs up; a hub that only stops reading fails test_a_peer_that_is_lost_is_hung_up_on."""
    connection.settimeout(2.0)
    with contextlib.suppress(ConnectionError, TimeoutError):
        yield


def send_with_descriptors(connection: socket.socket, data: bytes, descriptors: list[int]) -> None:
    connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])


def chain(size: int, kind: str = "unix", *, records: bool = False) -> list[Any]:
    """Hubs 0 - 1 - ... - size-1, each connected to the next; with records, so that they can answer questions."""
    hubs = [_core.Hub(rank) for rank in range(size)]
    for rank, hub in enumerate(hubs if records else []):
        hub.set_action_log(_core.ActionLog(rank, 16, ""))
    for left in range(size - 1):
        a, b = sockets(kind)
        hubs[left].add_peer(left + 1, a.detach())
        hubs[left + 1].add_peer(left, b.detach())
    for hub in hubs:
        hub.start()
    return hubs


def together(*functions: Any) -> None:
    """Calls all functions at the same moment, on threads of their own."""
    barrier = threading.Barrier(len(functions))
    errors: list[BaseException] = []

    def run(function: Any) -> None:
        try:
            barrier.wait(LONG)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), "a call hangs"
    if errors:
        raise errors[0]
