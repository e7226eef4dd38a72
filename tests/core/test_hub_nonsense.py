"""What a peer sends that it should not: it is lost, with a reason, and costs neither memory nor descriptors."""

from __future__ import annotations

import gc
import os
import struct

import pytest
from hub_peers import (
    ABORT,
    ENVELOPE,
    HEADER,
    LAYOUT,
    LEAVE,
    MAGIC,
    MEMORY,
    WAIT_POLICY,
    Neighbours,
    cause_of,
    failure,
    frame,
    read_frame,
    resident,
    send_all,
    send_with_descriptors,
    until_hung_up,
)

from pypipe import _core

LOST = _core.CauseKind.LOST
NONSENSE: dict[str, tuple[bytes, str]] = {
    "garbage": (os.urandom(4) + b"not a frame" * 9, "not a pypipe control frame"),
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "not a pypipe control frame"),
    "zeros": (bytes(200), "not a pypipe control frame"),
    "a frame, then garbage": (frame(ENVELOPE, bytes(48)) + bytes(64), "not a pypipe control frame"),
    "an unknown type": (frame(9), "not a pypipe control frame"),
    "type 0": (frame(0), "not a pypipe control frame"),
    "a reserved field that is used": (HEADER.pack(MAGIC, LAYOUT, 1, 0, 0, 0), "not a pypipe control frame"),
    "a layout of 4 GB": (frame(LAYOUT, length=0xFFFFFFFF), "at most 1048576"),
    "a layout one byte too long": (frame(LAYOUT, length=(1 << 20) + 1), "at most 1048576"),
    "an envelope too long": (frame(ENVELOPE, length=257), "at most 256"),
    "a cause that is garbage": (frame(ABORT, b"\xff\xfe\x00garbage"), "not a valid cause of a failure"),
    "a cause that is cut off": (frame(ABORT, failure("why").encode()[:-1]), "not a valid cause of a failure"),
    "a cause with bytes after it": (frame(ABORT, failure("why").encode() + b"x"), "not a valid cause of a failure"),
    "an empty cause": (frame(ABORT), "not a valid cause of a failure"),
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
    assert (cause.kind, cause.rank, cause.seen_by) == (LOST, 0, 1)
    assert reason in cause.message
    assert cause_of(neighbours.good, 1) == cause


@pytest.mark.parametrize("size", [1, 23, 24, 50])
def test_a_peer_that_dies_in_the_middle_of_a_frame_is_lost(neighbours: Neighbours, size: int) -> None:
    neighbours.raw.sendall(frame(LAYOUT, bytes(100))[:size])
    neighbours.raw.close()
    cause = cause_of(neighbours.hub, 2)
    assert (cause.kind, cause.rank) == (LOST, 0)
    assert "closed" in cause.message or "reset" in cause.message


def test_a_peer_that_is_lost_is_hung_up_on(neighbours: Neighbours) -> None:
    neighbours.raw.sendall(b"garbage, and enough of it to be read as a header")
    assert cause_of(neighbours.hub, 2).rank == 0
    neighbours.raw.settimeout(3.0)
    # It may be told why; then its connection ends, while the hub lives on.
    while read_frame(neighbours.raw) is not None:
        pass


def test_a_hub_that_its_peer_declares_lost_learns_of_it_at_once() -> None:
    neighbours = Neighbours()
    neighbours.raw.sendall(b"garbage, and enough of it to be read as a header")
    assert cause_of(neighbours.good, 1).rank == 0
    third = _core.Hub(0)
    third.add_peer(1, neighbours.raw.detach())
    third.start()
    with pytest.raises(_core.CoreError) as caught:
        third.take_envelope(1, 1, _core.WaitPolicy(3.0))
    assert caught.value.fault == "aborted", caught.value
    third.close()
    neighbours.close()


def test_frames_may_come_in_pieces_of_any_size(neighbours: Neighbours) -> None:
    data = b"".join(frame(ENVELOPE, struct.pack("=6I3Q", 5, 1, 0, i, 1, 0, 64, 2, 4), 5) for i in range(20))
    for start in range(0, len(data), 7):
        neighbours.raw.sendall(data[start : start + 7])
    assert [neighbours.hub.take_envelope(0, 5, WAIT_POLICY).microbatch for _ in range(20)] == list(range(20))


def test_an_envelope_of_a_wrong_length_is_a_protocol_error(neighbours: Neighbours) -> None:
    neighbours.raw.sendall(frame(ENVELOPE, bytes(47), 5))
    with pytest.raises(_core.CoreError) as caught:
        neighbours.hub.take_envelope(0, 5, WAIT_POLICY)
    assert caught.value.fault == "protocol"


def test_a_layout_frame_that_is_too_short_is_a_protocol_error(neighbours: Neighbours) -> None:
    book = _core.LayoutBook(neighbours.hub, 0, 3)
    neighbours.raw.sendall(frame(LAYOUT, b"short", 3, 1))
    with pytest.raises(_core.CoreError) as caught:
        book.description(1, WAIT_POLICY)
    assert caught.value.fault == "protocol"


def test_a_layout_that_was_never_announced_is_a_protocol_error(neighbours: Neighbours) -> None:
    book = _core.LayoutBook(neighbours.hub, 0, 3)
    neighbours.raw.sendall(frame(LAYOUT, bytes(16) + b"[]", 3, 9))
    with pytest.raises(_core.CoreError) as caught:
        book.description(1, WAIT_POLICY)
    assert caught.value.fault == "protocol"


def test_an_endless_stream_of_frames_for_one_channel_is_cut_off(neighbours: Neighbours) -> None:
    before = resident()
    with until_hung_up(neighbours.raw):
        for _ in range(256):
            neighbours.raw.sendall(frame(LAYOUT, bytes(1 << 20), 1))
    cause = cause_of(neighbours.hub, 2)
    assert (cause.kind, cause.rank) == (LOST, 0)
    assert "not asked for" in cause.message
    assert resident() - before < 160 << 20


def test_an_endless_stream_of_frames_for_ever_other_channels_is_cut_off(neighbours: Neighbours) -> None:
    before = resident()
    payload = bytes(1 << 16)
    with until_hung_up(neighbours.raw):
        for channel in range(1 << 12):
            neighbours.raw.sendall(frame(LAYOUT, payload, channel))
    grown = resident() - before
    assert grown < 160 << 20, f"the hub keeps {grown >> 20} MB of frames that nobody asked for"
    cause = cause_of(neighbours.hub, 2)
    assert (cause.kind, cause.rank) == (LOST, 0)


def test_small_frames_for_ever_other_channels_are_cut_off(neighbours: Neighbours) -> None:
    with until_hung_up(neighbours.raw):
        for start in range(0, 1 << 18, 512):
            neighbours.raw.sendall(b"".join(frame(ENVELOPE, channel=start + i) for i in range(512)))
        neighbours.raw.sendall(frame(ABORT, failure("the end").encode()))
    assert cause_of(neighbours.hub, 2).kind == LOST, "the hub took 262144 frames that nobody asked for"


def test_descriptors_that_belong_to_no_frame_do_not_pile_up() -> None:
    neighbours = Neighbours()
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    with open(os.devnull) as file, until_hung_up(neighbours.raw):
        for i in range(2000):
            send_with_descriptors(neighbours.raw, frame(ENVELOPE, channel=i % 7), [file.fileno()] * 4)
            if i % 50 == 0:
                most = max(most, len(os.listdir("/proc/self/fd")) - before)
    cause = cause_of(neighbours.hub, 2)
    assert (cause.kind, cause.rank) == (LOST, 0)
    assert "descriptors" in cause.message
    neighbours.close()
    assert most <= 100, most
    del neighbours
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before


def test_memory_frames_that_nobody_asked_for_do_not_use_up_the_process_descriptors() -> None:
    neighbours = Neighbours()
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    with open(os.devnull) as file, until_hung_up(neighbours.raw):
        for i in range(600):
            send_with_descriptors(neighbours.raw, frame(MEMORY, bytes(16), channel=i % 7), [file.fileno()])
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
            send_with_descriptors(neighbours.raw, frame(MEMORY, bytes(16), channel=i), [file.fileno()])
    neighbours.raw.sendall(frame(ENVELOPE, bytes(48), 5))
    neighbours.hub.take_envelope(0, 5, WAIT_POLICY)  # so the frames before have been read
    neighbours.close()
    del neighbours
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_is_not_what_it_should_be_is_refused_when_a_link_opens() -> None:
    neighbours = Neighbours()
    with open(os.devnull) as file:
        send_with_descriptors(neighbours.raw, frame(MEMORY, channel=1 << 31), [file.fileno()])
    with pytest.raises(_core.CoreError) as caught:
        _core.ShmReceiveLink(neighbours.hub, 0, 0, 4, WAIT_POLICY)
    assert caught.value.fault == "protocol"
    unsealed = os.memfd_create("pypipe-test")
    os.ftruncate(unsealed, 1 << 16)
    send_with_descriptors(neighbours.raw, frame(MEMORY, channel=(1 << 31) | 1), [unsealed])
    with pytest.raises(_core.CoreError) as caught:
        _core.ShmReceiveLink(neighbours.hub, 0, 1, 4, WAIT_POLICY)
    assert caught.value.fault == "protocol"
    os.close(unsealed)
    neighbours.close()
