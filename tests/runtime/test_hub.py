"""The hub: a peer that talks nonsense is lost, with a reason; causes reach everybody; goodbyes are no losses."""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pypipe import _core

LONG = 30.0
PATIENCE = _core.Patience(LONG)
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
    return _core.Envelope(0, ord("F"), microbatch, 1, 64, 2, 4)


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


@pytest.fixture(params=["unix", "tcp"])
def neighbours(request: pytest.FixtureRequest) -> Iterator[Neighbours]:
    """The same over a Unix socket and over TCP."""
    neighbours = Neighbours(request.param)
    yield neighbours
    neighbours.close()


def cause_of(hub: Any, peer: int) -> dict[str, Any]:
    """The first cause, as soon as the hub has one."""
    with pytest.raises(_core.CoreError) as caught:
        hub.take_envelope(peer, 12345, PATIENCE)
    assert caught.value.fault == "aborted", caught.value
    cause: dict[str, Any] = json.loads(hub.cause())
    return cause


def send_all(connection: socket.socket, data: bytes) -> None:
    """Sends, to a peer that may hang up in the middle of it."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)


NONSENSE: dict[str, tuple[bytes, str]] = {
    "garbage": (os.urandom(4) + b"not a frame" * 9, "no pypipe control frame"),
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "no pypipe control frame"),
    "zeros": (bytes(200), "no pypipe control frame"),
    "a frame, then garbage": (frame(ENVELOPE, bytes(48)) + bytes(64), "no pypipe control frame"),
    "an unknown type": (frame(9), "no pypipe control frame"),
    "type 0": (frame(0), "no pypipe control frame"),
    "a reserved field that is used": (HEADER.pack(MAGIC, LAYOUT, 1, 0, 0, 0), "no pypipe control frame"),
    "a layout of 4 GB": (frame(LAYOUT, length=0xFFFFFFFF), "at most 1048576"),
    "a layout one byte too long": (frame(LAYOUT, length=(1 << 20) + 1), "at most 1048576"),
    "an envelope too long": (frame(ENVELOPE, length=257), "at most 256"),
    "a cause too long": (frame(ABORT, length=(1 << 18) + 1), "at most 262144"),
    "a goodbye with a payload": (frame(LEAVE, b"x"), "at most 0"),
    "memory without a descriptor": (frame(MEMORY, bytes(16)), "without its descriptor"),
}


@pytest.mark.parametrize(("data", "reason"), NONSENSE.values(), ids=NONSENSE.keys())
def test_a_peer_that_sends_nonsense_is_lost_and_everybody_learns_why(
    neighbours: Neighbours, data: bytes, reason: str
) -> None:
    send_all(neighbours.raw, data)
    cause = cause_of(neighbours.hub, 2)
    assert (cause["kind"], cause["rank"], cause["seen_by"]) == ("lost", 0, 1)
    assert reason in cause["how"]
    assert cause_of(neighbours.good, 1) == cause


@pytest.mark.parametrize("size", [1, 23, 24, 50])
def test_a_peer_that_dies_in_the_middle_of_a_frame_is_lost(neighbours: Neighbours, size: int) -> None:
    neighbours.raw.sendall(frame(LAYOUT, bytes(100))[:size])
    neighbours.raw.close()
    cause = cause_of(neighbours.hub, 2)
    assert (cause["kind"], cause["rank"]) == ("lost", 0)
    assert "closed" in cause["how"] or "reset" in cause["how"]


def test_a_peer_that_is_lost_is_hung_up_on(neighbours: Neighbours) -> None:
    neighbours.raw.sendall(b"garbage, and enough of it to be read as a header")
    assert cause_of(neighbours.hub, 2)["rank"] == 0
    neighbours.raw.settimeout(3.0)
    # It may be told why; then its connection ends, while the hub lives on.
    while read_frame(neighbours.raw) is not None:
        pass


def test_a_hub_that_its_peer_declares_lost_learns_of_it_at_once() -> None:
    neighbours = Neighbours()
    neighbours.raw.sendall(b"garbage, and enough of it to be read as a header")
    assert cause_of(neighbours.good, 1)["rank"] == 0
    third = _core.Hub(0)
    third.add_peer(1, neighbours.raw.detach())
    third.start()
    with pytest.raises(_core.CoreError) as caught:
        third.take_envelope(1, 1, _core.Patience(3.0))
    assert caught.value.fault == "aborted", caught.value
    third.close()
    neighbours.close()


def test_frames_may_come_in_pieces_of_any_size(neighbours: Neighbours) -> None:
    data = b"".join(frame(ENVELOPE, struct.pack("=6I3Q", 5, 1, ord("F"), i, 1, 0, 64, 2, 4), 5) for i in range(20))
    for start in range(0, len(data), 7):
        neighbours.raw.sendall(data[start : start + 7])
    assert [neighbours.hub.take_envelope(0, 5, PATIENCE).microbatch for _ in range(20)] == list(range(20))


def test_an_envelope_of_a_wrong_length_is_a_protocol_error(neighbours: Neighbours) -> None:
    neighbours.raw.sendall(frame(ENVELOPE, bytes(47), 5))
    with pytest.raises(_core.CoreError) as caught:
        neighbours.hub.take_envelope(0, 5, PATIENCE)
    assert caught.value.fault == "protocol"


def test_a_layout_frame_that_is_too_short_is_a_protocol_error(neighbours: Neighbours) -> None:
    book = _core.LayoutBook(neighbours.hub, 0, 3)
    neighbours.raw.sendall(frame(LAYOUT, b"short", 3, 1))
    with pytest.raises(_core.CoreError) as caught:
        book.description(1, PATIENCE)
    assert caught.value.fault == "protocol"


def test_a_layout_that_was_never_announced_is_a_protocol_error(neighbours: Neighbours) -> None:
    book = _core.LayoutBook(neighbours.hub, 0, 3)
    neighbours.raw.sendall(frame(LAYOUT, bytes(16) + b"[]", 3, 9))
    with pytest.raises(_core.CoreError) as caught:
        book.description(1, PATIENCE)
    assert caught.value.fault == "protocol"


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def _until_hung_up(connection: socket.socket) -> Iterator[None]:
    """Sends until the hub hangs up; a hub that only stops reading fails test_a_peer_that_is_lost_is_hung_up_on."""
    connection.settimeout(2.0)
    with contextlib.suppress(ConnectionError, TimeoutError):
        yield


def test_an_endless_stream_of_frames_for_one_channel_is_cut_off(neighbours: Neighbours) -> None:
    before = _resident()
    with _until_hung_up(neighbours.raw):
        for _ in range(256):
            neighbours.raw.sendall(frame(LAYOUT, bytes(1 << 20), 1))
    cause = cause_of(neighbours.hub, 2)
    assert (cause["kind"], cause["rank"]) == ("lost", 0)
    assert "nobody asked for" in cause["how"]
    assert _resident() - before < 160 << 20


def test_an_endless_stream_of_frames_for_ever_other_channels_is_cut_off(neighbours: Neighbours) -> None:
    before = _resident()
    payload = bytes(1 << 16)
    with _until_hung_up(neighbours.raw):
        for channel in range(1 << 12):
            neighbours.raw.sendall(frame(LAYOUT, payload, channel))
    grown = _resident() - before
    assert grown < 160 << 20, f"the hub keeps {grown >> 20} MB of frames that nobody asked for"
    cause = cause_of(neighbours.hub, 2)
    assert (cause["kind"], cause["rank"]) == ("lost", 0)


def test_small_frames_for_ever_other_channels_are_cut_off(neighbours: Neighbours) -> None:
    with _until_hung_up(neighbours.raw):
        for start in range(0, 1 << 18, 512):
            neighbours.raw.sendall(b"".join(frame(ENVELOPE, channel=start + i) for i in range(512)))
        neighbours.raw.sendall(frame(ABORT, b'{"kind":"end"}'))
    assert cause_of(neighbours.hub, 2)["kind"] == "lost", "the hub took 262144 frames that nobody asked for"


def _send_with_descriptors(connection: socket.socket, data: bytes, descriptors: list[int]) -> None:
    connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])


def test_descriptors_that_belong_to_no_frame_do_not_pile_up() -> None:
    neighbours = Neighbours()
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    with open(os.devnull) as file, _until_hung_up(neighbours.raw):
        for i in range(2000):
            _send_with_descriptors(neighbours.raw, frame(ENVELOPE, channel=i % 7), [file.fileno()] * 4)
            if i % 50 == 0:
                most = max(most, len(os.listdir("/proc/self/fd")) - before)
    cause = cause_of(neighbours.hub, 2)
    assert (cause["kind"], cause["rank"]) == ("lost", 0)
    assert "descriptors" in cause["how"]
    neighbours.close()
    assert most <= 100, most
    del neighbours
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before


def test_memory_frames_that_nobody_asked_for_do_not_use_up_the_process_descriptors() -> None:
    neighbours = Neighbours()
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    with open(os.devnull) as file, _until_hung_up(neighbours.raw):
        for i in range(600):
            _send_with_descriptors(neighbours.raw, frame(MEMORY, bytes(16), channel=i % 7), [file.fileno()])
            if i % 20 == 19:
                most = max(most, len(os.listdir("/proc/self/fd")) - before)
    neighbours.close()
    assert most <= 300, f"{most} descriptors of one peer lie in the hub; a process has 1024"


def test_descriptors_of_frames_that_were_never_taken_are_closed_with_the_hub() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    neighbours = Neighbours()
    with open(os.devnull) as file:
        for i in range(8):
            _send_with_descriptors(neighbours.raw, frame(MEMORY, bytes(16), channel=i), [file.fileno()])
    neighbours.raw.sendall(frame(ENVELOPE, bytes(48), 5))
    neighbours.hub.take_envelope(0, 5, PATIENCE)  # so the frames before have been read
    neighbours.close()
    del neighbours
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_is_not_what_it_should_be_is_refused_when_a_link_opens() -> None:
    neighbours = Neighbours()
    with open(os.devnull) as file:
        _send_with_descriptors(neighbours.raw, frame(MEMORY, channel=1 << 31), [file.fileno()])
    with pytest.raises(_core.CoreError) as caught:
        _core.ShmReceiveLink(neighbours.hub, 0, 0, 4, PATIENCE)
    assert caught.value.fault == "protocol"
    unsealed = os.memfd_create("pypipe-test")
    os.ftruncate(unsealed, 1 << 16)
    _send_with_descriptors(neighbours.raw, frame(MEMORY, channel=(1 << 31) | 1), [unsealed])
    with pytest.raises(_core.CoreError) as caught:
        _core.ShmReceiveLink(neighbours.hub, 0, 1, 4, PATIENCE)
    assert caught.value.fault == "protocol"
    os.close(unsealed)
    neighbours.close()


def chain(size: int, kind: str = "unix") -> list[Any]:
    """Hubs 0 - 1 - ... - size-1, each connected to the next."""
    hubs = [_core.Hub(rank) for rank in range(size)]
    for left in range(size - 1):
        a, b = sockets(kind)
        hubs[left].add_peer(left + 1, a.detach())
        hubs[left + 1].add_peer(left, b.detach())
    for hub in hubs:
        hub.start()
    return hubs


def _together(*functions: Any) -> None:
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


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_goodbyes_that_cross_are_not_losses(kind: str) -> None:
    for _ in range(300):
        hubs = chain(2, kind)
        _together(*(hub.close for hub in hubs))
        assert [hub.cause() for hub in hubs] == [None, None]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_goodbye_with_unread_frames_behind_it_is_not_a_loss(kind: str) -> None:
    for _ in range(100):
        left, right = chain(2, kind)

        def talk(hub: Any = right) -> None:
            with contextlib.suppress(_core.CoreError):
                for i in range(200):
                    hub.send_envelope(0, envelope(i), 1, PATIENCE)

        _together(left.close, talk)
        with pytest.raises(_core.CoreError) as caught:
            right.take_envelope(0, 1, PATIENCE)
        assert caught.value.fault == "peer_gone", (caught.value, right.cause())
        assert right.cause() is None
        right.close()


def test_what_was_sent_before_a_goodbye_still_arrives() -> None:
    left, right = chain(2)
    for i in range(50):
        left.send_envelope(1, envelope(i), 4, PATIENCE)
    left.close()
    assert [right.take_envelope(0, 4, PATIENCE).microbatch for _ in range(50)] == list(range(50))
    with pytest.raises(_core.CoreError) as caught:
        right.take_envelope(0, 4, PATIENCE)
    assert caught.value.fault == "peer_gone"
    assert right.cause() is None
    right.close()


def test_a_peer_that_leaves_wakes_whoever_waits_for_it_and_nobody_else() -> None:
    left, middle, right = chain(3)
    _together(left.close, lambda: _expect(middle, 0, "peer_gone"))
    right.send_envelope(1, envelope(7), 2, PATIENCE)
    assert middle.take_envelope(2, 2, PATIENCE).microbatch == 7
    middle.check(2)
    assert middle.cause() is None
    for hub in (middle, right):
        hub.close()


def _expect(hub: Any, peer: int, fault: str) -> None:
    with pytest.raises(_core.CoreError) as caught:
        hub.take_envelope(peer, 1, PATIENCE)
    assert caught.value.fault == fault, caught.value


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("origin", [0, 2, 4])
def test_a_cause_wakes_every_waiting_rank_of_a_chain(kind: str, origin: int) -> None:
    hubs = chain(5, kind)
    cause = json.dumps({"kind": "error", "rank": origin})
    waits = [
        lambda rank=rank: _expect(hubs[rank], rank - 1 if rank else 1, "aborted") for rank in range(5) if rank != origin
    ]
    _together(*waits, lambda: hubs[origin].abort(cause))
    assert {hub.cause() for hub in hubs} == {cause}
    for hub in hubs:
        hub.close()


def test_the_first_cause_stays_the_cause() -> None:
    hubs = chain(3)
    hubs[0].abort("first")
    hubs[0].abort("second")
    _expect(hubs[2], 1, "aborted")
    hubs[2].abort("third")
    assert [hub.cause() for hub in hubs] == ["first"] * 3
    with pytest.raises(_core.CoreError):
        hubs[0].check(1)
    with pytest.raises(_core.CoreError):
        hubs[0].send_envelope(1, envelope(), 1, PATIENCE)
    for hub in hubs:
        hub.close()
    assert [hub.cause() for hub in hubs] == ["first"] * 3


def test_causes_that_arise_at_both_ends_at_once_leave_every_rank_with_one_of_them() -> None:
    for _ in range(50):
        hubs = chain(4)
        _together(lambda hubs=hubs: hubs[0].abort("left"), lambda hubs=hubs: hubs[3].abort("right"))
        _expect(hubs[1], 0, "aborted")
        _expect(hubs[2], 3, "aborted")
        assert {hub.cause() for hub in hubs} <= {"left", "right"}
        for hub in hubs:
            hub.close()


def test_a_cause_is_passed_on_even_when_the_rank_between_closes_as_soon_as_it_hears_it() -> None:
    for attempt in range(300):
        left, middle, right = chain(3)

        def hear_and_close(middle: Any = middle) -> None:
            _expect(middle, 0, "aborted")
            middle.close()

        def last(right: Any = right, attempt: int = attempt) -> None:
            with pytest.raises(_core.CoreError) as caught:
                right.take_envelope(1, 1, PATIENCE)
            assert (caught.value.fault, right.cause()) == ("aborted", "because"), f"attempt {attempt}: {caught.value}"

        try:
            _together(lambda left=left: left.abort("because"), hear_and_close, last)
        finally:
            for hub in (left, middle, right):
                hub.close()


def test_a_cause_of_any_size_travels_up_to_its_limit() -> None:
    left, right = chain(2)
    left.abort("x" * (1 << 20))
    _expect(right, 0, "aborted")
    assert right.cause() == "x" * (1 << 18)
    for hub in (left, right):
        hub.close()


def test_a_lost_peer_is_told_to_the_others_but_a_hub_that_closed_is_not_a_loss() -> None:
    neighbours = Neighbours()
    neighbours.raw.sendall(frame(LEAVE))
    neighbours.raw.close()
    with pytest.raises(_core.CoreError) as caught:
        neighbours.hub.take_envelope(0, 1, PATIENCE)
    assert caught.value.fault == "peer_gone"
    neighbours.good.send_envelope(1, envelope(3), 2, PATIENCE)
    assert neighbours.hub.take_envelope(2, 2, PATIENCE).microbatch == 3
    assert neighbours.hub.cause() is None
    neighbours.close()


def test_whatever_a_peer_calls_a_cause_is_handed_on_as_text(neighbours: Neighbours) -> None:
    neighbours.raw.sendall(frame(ABORT, b'{"kind":"error","rank":0}'))
    assert cause_of(neighbours.good, 1) == {"kind": "error", "rank": 0}


def test_a_cause_that_is_no_text_does_not_break_the_hub(neighbours: Neighbours) -> None:
    neighbours.raw.sendall(frame(ABORT, b"\xff\xfe\x00garbage"))
    _expect(neighbours.hub, 2, "aborted")
    _expect(neighbours.good, 1, "aborted")
    for hub in (neighbours.hub, neighbours.good):
        assert isinstance(hub.cause(), str)


def test_a_closed_hub_says_goodbye_once_and_refuses_to_send(neighbours: Neighbours) -> None:
    neighbours.hub.close()
    neighbours.hub.close()
    assert read_frame(neighbours.raw) == (LEAVE, b"")
    assert read_frame(neighbours.raw) is None
    with pytest.raises(_core.CoreError):
        neighbours.hub.send_envelope(0, envelope(), 1, PATIENCE)


def test_a_peer_that_does_not_read_costs_no_more_than_the_timeout(neighbours: Neighbours) -> None:
    def send_for_ever() -> None:
        while True:
            neighbours.hub.send_envelope(0, envelope(), 1, _core.Patience(0.05))

    with pytest.raises(_core.CoreError) as caught:
        send_for_ever()
    assert caught.value.fault == "timeout"
    assert "does not read" in str(caught.value)
    neighbours.hub.check(0)


def test_frames_stay_whole_when_a_send_is_given_up(neighbours: Neighbours) -> None:
    announcer = _core.LayoutAnnouncer(neighbours.hub, 0, 3)

    def announce_for_ever() -> None:
        while True:
            announcer.announce("x" * 300_001, 64, 0, _core.Patience(0.05))

    with pytest.raises(_core.CoreError):
        announce_for_ever()
    received = b""
    done = threading.Event()

    def drain() -> None:
        nonlocal received
        with contextlib.suppress(OSError):
            while part := neighbours.raw.recv(1 << 16):
                received += part
        done.set()

    threading.Thread(target=drain, daemon=True).start()
    neighbours.hub.abort('{"why":"it took too long"}')
    neighbours.hub.close()
    assert done.wait(LONG)
    whole, rest = frames(received)
    assert {kind for kind, _ in whole} <= {LAYOUT, ABORT, LEAVE}
    payloads = [payload for kind, payload in whole if kind == LAYOUT]
    payloads.append(rest[HEADER.size :])
    assert all(payload[16:].strip(b"x") == b"" for payload in payloads), "an abort was written into another frame"
    # Either the cause arrives, or the connection ends where the frame was broken off.
    assert (ABORT, b'{"why":"it took too long"}') in whole or rest


def test_unknown_neighbours_and_second_starts_are_refused() -> None:
    left, right = chain(2)
    for call in (
        lambda: left.check(5),
        lambda: left.take_envelope(5, 1, PATIENCE),
        lambda: left.send_envelope(5, envelope(), 1, PATIENCE),
        left.start,
    ):
        with pytest.raises(_core.CoreError) as caught:
            call()
        assert caught.value.fault == "usage"
    a, b = sockets("unix")
    with pytest.raises(_core.CoreError):
        left.add_peer(3, a.detach())
    b.close()
    for hub in (left, right):
        hub.close()


def test_a_hub_that_is_collected_says_goodbye() -> None:
    left, right = chain(2)
    del left
    _expect(right, 0, "peer_gone")
    assert right.cause() is None
    right.close()


def test_ctrl_c_interrupts_a_wait() -> None:
    left, right = chain(2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            left.take_envelope(1, 1, PATIENCE)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    left.check(1)
    for hub in (left, right):
        hub.close()


def test_the_interrupt_of_a_wait_may_be_any_exception_of_a_signal_handler() -> None:
    class Alarm(Exception):
        pass

    def handler(*_: object) -> None:
        raise Alarm

    left, right = chain(2)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            left.take_envelope(1, 1, PATIENCE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for hub in (left, right):
        hub.close()


def test_a_forked_child_does_not_keep_a_dead_parents_connection_open() -> None:
    mine, theirs = sockets("unix")
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        # A process with a hub forks, as a data loader does, and dies. Its own child lives on.
        try:
            mine.close()
            os.close(reader)
            hub = _core.Hub(0)
            hub.add_peer(1, theirs.detach())
            hub.start()
            child = os.fork()
            if child == 0:
                hub.abandon()
                os.write(writer, b"%d\n" % os.getpid())
                signal.pause()
        finally:
            os._exit(0)
    theirs.close()
    os.close(writer)
    with os.fdopen(reader) as file:
        child = int(file.readline())
    os.waitpid(parent, 0)
    hub = _core.Hub(1)
    hub.add_peer(0, mine.detach())
    hub.start()
    assert cause_of(hub, 0)["rank"] == 0
    os.kill(child, signal.SIGKILL)
    hub.close()
