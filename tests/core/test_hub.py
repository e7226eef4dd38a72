"""The hub: causes reach everybody; goodbyes are no losses; waits can be interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any

import pytest
from hub_peers import (
    ABORT,
    HEADER,
    LAYOUT,
    LEAVE,
    LONG,
    WAIT_POLICY,
    Neighbours,
    cause_of,
    chain,
    envelope,
    failure,
    frame,
    frames,
    read_frame,
    sockets,
    together,
)

from pypipe import _core


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_goodbyes_that_cross_are_not_losses(kind: str) -> None:
    for _ in range(300):
        hubs = chain(2, kind)
        together(*(hub.close for hub in hubs))
        assert [hub.cause() for hub in hubs] == [None, None]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_goodbye_with_unread_frames_behind_it_is_not_a_loss(kind: str) -> None:
    for _ in range(100):
        left, right = chain(2, kind)

        def talk(hub: Any = right) -> None:
            with contextlib.suppress(_core.CoreError):
                for i in range(200):
                    hub.send_envelope(0, envelope(i), 1, WAIT_POLICY)

        together(left.close, talk)
        with pytest.raises(_core.CoreError) as caught:
            right.take_envelope(0, 1, WAIT_POLICY)
        assert caught.value.fault == "peer_gone", (caught.value, right.cause())
        assert right.cause() is None
        right.close()


def test_what_was_sent_before_a_goodbye_still_arrives() -> None:
    left, right = chain(2)
    for i in range(50):
        left.send_envelope(1, envelope(i), 4, WAIT_POLICY)
    left.close()
    assert [right.take_envelope(0, 4, WAIT_POLICY).microbatch for _ in range(50)] == list(range(50))
    with pytest.raises(_core.CoreError) as caught:
        right.take_envelope(0, 4, WAIT_POLICY)
    assert caught.value.fault == "peer_gone"
    assert right.cause() is None
    right.close()


def test_a_peer_that_leaves_wakes_whoever_waits_for_it_and_nobody_else() -> None:
    left, middle, right = chain(3)
    together(left.close, lambda: _expect(middle, 0, "peer_gone"))
    right.send_envelope(1, envelope(7), 2, WAIT_POLICY)
    assert middle.take_envelope(2, 2, WAIT_POLICY).microbatch == 7
    middle.check(2)
    assert middle.cause() is None
    for hub in (middle, right):
        hub.close()


def _expect(hub: Any, peer: int, fault: str) -> None:
    with pytest.raises(_core.CoreError) as caught:
        hub.take_envelope(peer, 1, WAIT_POLICY)
    assert caught.value.fault == fault, caught.value


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("origin", [0, 2, 4])
def test_a_cause_wakes_every_waiting_rank_of_a_chain(kind: str, origin: int) -> None:
    hubs = chain(5, kind)
    cause = failure("why", origin)
    waits = [
        lambda rank=rank: _expect(hubs[rank], rank - 1 if rank else 1, "aborted") for rank in range(5) if rank != origin
    ]
    together(*waits, lambda: hubs[origin].abort(cause))
    assert {hub.cause() for hub in hubs} == {cause}
    for hub in hubs:
        hub.close()


def test_a_rank_that_has_said_goodbye_still_passes_on_causes_and_questions() -> None:
    hubs = chain(4, records=True)
    hubs[1].leave()
    hubs[2].leave()
    _expect(hubs[0], 1, "peer_gone")
    _expect(hubs[3], 2, "peer_gone")
    _expect(hubs[1], 2, "peer_gone")
    _expect(hubs[2], 1, "peer_gone")
    assert [hub.departed() for hub in hubs] == [[1], [2], [1], [2]]
    told = {report.status.rank: report.silent for report in hubs[3].ask(4, WAIT_POLICY)}
    assert told == dict.fromkeys(range(4), False)
    hubs[0].abort(failure("first"))
    hubs[3].ask(5, WAIT_POLICY)  # waits for a fifth rank, or until the pipeline has failed
    for hub in hubs:
        hub.close()
    assert [hub.cause() for hub in hubs] == [failure("first")] * 4


def test_a_socket_that_ends_after_a_goodbye_is_no_loss() -> None:
    hubs = chain(3)
    hubs[1].leave()
    _expect(hubs[0], 1, "peer_gone")
    hubs[1].close()
    hubs[1].close()
    _expect(hubs[2], 1, "peer_gone")
    for hub in hubs:
        hub.close()
    assert [hub.cause() for hub in hubs] == [None] * 3


def test_the_first_cause_stays_the_cause() -> None:
    hubs = chain(3)
    hubs[0].abort(failure("first"))
    hubs[0].abort(failure("second"))
    _expect(hubs[2], 1, "aborted")
    hubs[2].abort(failure("third"))
    assert [hub.cause() for hub in hubs] == [failure("first")] * 3
    with pytest.raises(_core.CoreError):
        hubs[0].check(1)
    with pytest.raises(_core.CoreError):
        hubs[0].send_envelope(1, envelope(), 1, WAIT_POLICY)
    for hub in hubs:
        hub.close()
    assert [hub.cause() for hub in hubs] == [failure("first")] * 3


def test_causes_that_arise_at_both_ends_at_once_leave_every_rank_with_one_of_them() -> None:
    for _ in range(50):
        hubs = chain(4)
        together(lambda hubs=hubs: hubs[0].abort(failure("left")), lambda hubs=hubs: hubs[3].abort(failure("right")))
        _expect(hubs[1], 0, "aborted")
        _expect(hubs[2], 3, "aborted")
        assert {hub.cause() for hub in hubs} <= {failure("left"), failure("right")}
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
                right.take_envelope(1, 1, WAIT_POLICY)
            assert (caught.value.fault, right.cause()) == ("aborted", failure("because")), (
                f"attempt {attempt}: {caught.value}"
            )

        try:
            together(lambda left=left: left.abort(failure("because")), hear_and_close, last)
        finally:
            for hub in (left, middle, right):
                hub.close()


def test_a_cause_of_any_size_travels_up_to_its_limit() -> None:
    left, right = chain(2)
    left.abort(failure("\N{SNOWMAN}" * (1 << 20)))
    _expect(right, 0, "aborted")
    heard = right.cause()
    assert heard is not None
    assert heard.message == "\N{SNOWMAN}" * ((1 << 16) // 3)  # no character is cut
    for hub in (left, right):
        hub.close()


def test_a_lost_peer_is_told_to_the_others_but_a_hub_that_closed_is_not_a_loss() -> None:
    neighbours = Neighbours()
    neighbours.raw.sendall(frame(LEAVE))
    neighbours.raw.close()
    with pytest.raises(_core.CoreError) as caught:
        neighbours.hub.take_envelope(0, 1, WAIT_POLICY)
    assert caught.value.fault == "peer_gone"
    neighbours.good.send_envelope(1, envelope(3), 2, WAIT_POLICY)
    assert neighbours.hub.take_envelope(2, 2, WAIT_POLICY).microbatch == 3
    assert neighbours.hub.cause() is None
    neighbours.close()


def test_a_cause_keeps_every_field_over_the_wire(neighbours: Neighbours) -> None:
    entry = _core.ActionEntry(3, _core.ActionKind.B.value, 7, 2, 1_000, 500, 0)
    status = _core.RankStatus(5, 9, now=entry, busy="compiling", busy_for=1.5)
    cause = _core.Cause(
        _core.CauseKind.OVERDUE,
        4,
        seen_by=3,
        stage=2,
        action_kind=_core.ActionKind.SEND_F.value,
        microbatch=1,
        call=6,
        call_name="step()",
        trains=True,
        doing="at work",
        type="ValueError",
        message="a file's name: \udcff",
        traceback="Traceback",
        ranks=8,
        limit=2.5,
        reports=[_core.RankReport(status, silent=True), _core.RankReport(_core.RankStatus(1, 0))],
    )
    neighbours.raw.sendall(frame(ABORT, cause.encode()))
    heard = cause_of(neighbours.good, 1)
    assert heard == cause
    numbers = (heard.kind, heard.rank, heard.seen_by, heard.stage, heard.action_kind, heard.microbatch)
    assert numbers == (_core.CauseKind.OVERDUE, 4, 3, 2, _core.ActionKind.SEND_F.value, 1)
    assert (heard.call, heard.call_name, heard.trains, heard.ranks, heard.limit) == (6, "step()", True, 8, 2.5)
    texts = (heard.doing, heard.type, heard.message, heard.traceback)
    assert texts == ("at work", "ValueError", "a file's name: \\udcff", "Traceback")
    first, second = heard.reports
    assert (first.silent, second.silent) == (True, False)
    assert (first.status.rank, first.status.step, first.status.busy, first.status.busy_for) == (5, 9, "compiling", 1.5)
    now = first.status.now
    assert now is not None
    assert (now.stage, now.kind, now.microbatch, now.step, now.start, now.ready) == (3, 1, 7, 2, 1_000, 500)
    assert (first.status.last, second.status.now, second.status.busy) == (None, None, None)


def test_what_is_not_known_of_a_cause_is_none() -> None:
    cause = _core.Cause.decode(_core.Cause(_core.CauseKind.LINK, 1).encode())
    assert (cause.seen_by, cause.stage, cause.action_kind, cause.microbatch) == (None,) * 4
    assert (cause.call, cause.message, cause.reports) == (0, "", [])


@pytest.mark.parametrize("at", range(72))
def test_a_header_with_another_byte_is_refused_or_is_another_cause(at: int) -> None:
    status = _core.RankReport(_core.RankStatus(1, 0))
    whole = _core.Cause(_core.CauseKind.LOST, 1, message="why", reports=[status]).encode()
    damaged = bytearray(whole)
    damaged[at] ^= 0x80
    try:
        found = _core.Cause.decode(bytes(damaged))
    except _core.CoreError as error:
        assert error.fault == "protocol"
    else:
        assert found.message == "why"
        assert len(found.reports) == 1


def test_reports_that_find_no_room_in_a_cause_are_left_out() -> None:
    reports = [_core.RankReport(_core.RankStatus(rank, 0)) for rank in range(5000)]
    encoded = _core.Cause(_core.CauseKind.OVERDUE, 0, message="late", ranks=5000, reports=reports).encode()
    assert 1 << 17 < len(encoded) <= 1 << 18
    kept = [report.status.rank for report in _core.Cause.decode(encoded).reports]
    assert kept == list(range(len(kept)))
    assert len(kept) > 1000


def test_a_closed_hub_says_goodbye_once_and_refuses_to_send(neighbours: Neighbours) -> None:
    neighbours.hub.close()
    neighbours.hub.close()
    assert read_frame(neighbours.raw) == (LEAVE, b"")
    assert read_frame(neighbours.raw) is None
    with pytest.raises(_core.CoreError):
        neighbours.hub.send_envelope(0, envelope(), 1, WAIT_POLICY)


def test_a_peer_that_does_not_read_costs_no_more_than_the_timeout(neighbours: Neighbours) -> None:
    def send_for_ever() -> None:
        while True:
            neighbours.hub.send_envelope(0, envelope(), 1, _core.WaitPolicy(0.05))

    with pytest.raises(_core.CoreError) as caught:
        send_for_ever()
    assert caught.value.fault == "timeout"
    assert "does not read" in str(caught.value)
    neighbours.hub.check(0)


def test_frames_stay_whole_when_a_send_is_given_up(neighbours: Neighbours) -> None:
    announcer = _core.LayoutAnnouncer(neighbours.hub, 0, 3)

    def announce_for_ever() -> None:
        while True:
            announcer.announce("x" * 300_001, 64, 0, _core.WaitPolicy(0.05))

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
    neighbours.hub.abort(failure("it took too long"))
    neighbours.hub.close()
    assert done.wait(LONG)
    whole, rest = frames(received)
    assert {kind for kind, _ in whole} <= {LAYOUT, ABORT, LEAVE}
    payloads = [payload for kind, payload in whole if kind == LAYOUT]
    payloads.append(rest[HEADER.size :])
    assert all(payload[16:].strip(b"x") == b"" for payload in payloads), "an abort was written into another frame"
    # Either the cause arrives, or the connection ends where the frame was broken off.
    assert (ABORT, failure("it took too long").encode()) in whole or rest


def test_unknown_neighbours_and_second_starts_are_refused() -> None:
    left, right = chain(2)
    for call in (
        lambda: left.check(5),
        lambda: left.take_envelope(5, 1, WAIT_POLICY),
        lambda: left.send_envelope(5, envelope(), 1, WAIT_POLICY),
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
            left.take_envelope(1, 1, WAIT_POLICY)
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
            left.take_envelope(1, 1, WAIT_POLICY)
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
    assert cause_of(hub, 0).rank == 0
    os.kill(child, signal.SIGKILL)
    hub.close()
