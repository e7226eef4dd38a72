"""Control sockets: peers get through, strangers do not, and nobody waits without end."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from pypipe.errors import PipelineTimeout
from pypipe.runtime.rendezvous.handshake import Address, Listener, connect

SECRET = b"s" * 32
MAGIC = b"pypipe1\n"
LONG = 30.0  # seconds that no test takes unless something hangs


def _soon(seconds: float = LONG) -> float:
    return time.monotonic() + seconds


def _hello(rank: int, peer: int, magic: bytes = MAGIC) -> bytes:
    return struct.pack("<8sII32s", magic, rank, peer, secrets.token_bytes(32))


def _proof(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + hello + nonce, "sha256")


def _dial(address: Address) -> socket.socket:
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + address)  # with a timeout, it would fail where it has to wait
        connection.settimeout(LONG)
        return connection
    return socket.create_connection(address, LONG)


def _read(connection: socket.socket, size: int) -> bytes:
    """As much of `size` bytes as comes before the other end closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < size and (part := connection.recv(size - len(data))):
            data += part
    return data


def _is_dropped(connection: socket.socket) -> bool:
    """Whether the other end closes without a word."""
    with connection:
        return _read(connection, 1) == b""


@pytest.fixture(params=["unix", "127.0.0.1"])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    """A listener of rank 0, over a Unix socket and over TCP."""
    listener = Listener(0, request.param)
    yield listener
    listener.close()


class Accepting:
    """Accepts in a thread, so that the test can play the ranks that connect, and strangers."""

    def __init__(self, listener: Listener, expected: set[int], secret: bytes = SECRET, seconds: float = LONG) -> None:
        self._future: Future[dict[int, socket.socket]] = Future()

        def run() -> None:
            try:
                self._future.set_result(listener.accept(expected, secret, _soon(seconds)))
            except BaseException as error:
                self._future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()

    def result(self) -> dict[int, socket.socket]:
        return self._future.result(LONG)


def _check_pair(mine: socket.socket, theirs: socket.socket) -> None:
    """What goes in at one end comes out at the other."""
    for source, target in ((mine, theirs), (theirs, mine)):
        word = secrets.token_bytes(8)
        source.setblocking(True)
        target.settimeout(LONG)
        source.sendall(word)
        assert _read(target, 8) == word


def _join(accepting: Accepting, listener: Listener, *ranks: int) -> None:
    """The expected ranks connect, and the connections are theirs."""
    mine = {rank: connect(rank, 0, listener.address, SECRET, _soon()) for rank in ranks}
    accepted = accepting.result()
    assert sorted(accepted) == sorted(ranks)
    for rank in ranks:
        _check_pair(mine[rank], accepted[rank])
        mine[rank].close()
        accepted[rank].close()


def test_each_expected_rank_gets_a_connection_of_its_own_in_any_order(listener: Listener) -> None:
    _join(Accepting(listener, {1, 2, 3}), listener, 3, 1, 2)


def test_ranks_that_connect_before_the_listener_accepts_are_let_in(listener: Listener) -> None:
    with ThreadPoolExecutor(2) as pool:
        futures = {rank: pool.submit(connect, rank, 0, listener.address, SECRET, _soon()) for rank in (1, 2)}
        accepted = listener.accept({1, 2}, SECRET, _soon())
        for rank, future in futures.items():
            _check_pair(future.result(LONG), accepted[rank])
            future.result().close()
            accepted[rank].close()


def test_connections_are_not_inherited_by_programs_that_are_started_later(listener: Listener) -> None:
    accepting = Accepting(listener, {1})
    mine = connect(1, 0, listener.address, SECRET, _soon())
    accepted = accepting.result()
    assert not mine.get_inheritable()
    assert not accepted[1].get_inheritable()
    mine.close()
    accepted[1].close()


STRANGERS: dict[str, bytes] = {
    "garbage": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "one wrong byte": b"p" + b"\0" * 60,
    "another version": _hello(1, 0, b"pypipe9\n"),
    "a rank that is not expected": _hello(7, 0),
    "a rank out of this world": _hello(0xFFFFFFFF, 0),
    "the listener's own rank": _hello(0, 0),
    "a hello for another rank": _hello(1, 4),
    "a lot of garbage": os.urandom(1 << 16),
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_disconnected_without_an_answer_and_the_peer_gets_in(listener: Listener, words: bytes) -> None:
    accepting = Accepting(listener, {1})
    stranger = _dial(listener.address)
    with contextlib.suppress(ConnectionError):
        stranger.sendall(words)
    assert _is_dropped(stranger)
    _join(accepting, listener, 1)


def test_strangers_who_stop_halfway_or_say_nothing_do_not_keep_the_peers_out(listener: Listener) -> None:
    accepting = Accepting(listener, {1, 2})
    hello = _hello(1, 0)
    slow = [_dial(listener.address) for _ in range(3)]
    slow[1].sendall(hello[:20])
    slow[2].sendall(hello)  # and never the proof
    assert len(_read(slow[2], 64)) == 64
    gone = _dial(listener.address)
    gone.sendall(hello[:11])
    gone.close()
    _join(accepting, listener, 2, 1)
    for stranger in slow:
        assert _is_dropped(stranger)


def test_whoever_does_not_know_the_secret_is_not_accepted(listener: Listener) -> None:
    accepting = Accepting(listener, {1})
    for secret in (b"", b"x" * 32, SECRET[:-1]):
        stranger = _dial(listener.address)
        hello = _hello(1, 0)
        stranger.sendall(hello)
        nonce = _read(stranger, 64)[:32]
        stranger.sendall(_proof(secret, b"connector", hello, nonce))
        assert _is_dropped(stranger)
    _join(accepting, listener, 1)


def test_the_listeners_own_proof_sent_back_to_it_proves_nothing(listener: Listener) -> None:
    accepting = Accepting(listener, {1})
    stranger = _dial(listener.address)
    stranger.sendall(_hello(1, 0))
    answer = _read(stranger, 64)
    stranger.sendall(answer[32:])
    assert _is_dropped(stranger)
    _join(accepting, listener, 1)


def test_a_replayed_handshake_is_not_accepted(listener: Listener) -> None:
    accepting = Accepting(listener, {1, 2})
    first = _dial(listener.address)
    hello = _hello(1, 0)
    first.sendall(hello)
    proof = _proof(SECRET, b"connector", hello, _read(first, 64)[:32])
    replay = _dial(listener.address)
    replay.sendall(hello)
    assert len(_read(replay, 64)) == 64
    replay.sendall(proof)  # right for the other connection's nonce
    assert _is_dropped(replay)
    first.sendall(proof)
    assert _read(first, 1) == b"\x01"
    mine = connect(2, 0, listener.address, SECRET, _soon())
    accepted = accepting.result()
    _check_pair(first, accepted[1])
    for connection in (first, mine, *accepted.values()):
        connection.close()


def test_a_rank_that_is_connected_already_is_not_accepted_again(listener: Listener) -> None:
    accepting = Accepting(listener, {1, 2})
    first = connect(1, 0, listener.address, SECRET, _soon())
    late = _dial(listener.address)
    late.sendall(_hello(1, 0))
    assert _is_dropped(late)
    second = connect(2, 0, listener.address, SECRET, _soon())
    accepted = accepting.result()
    _check_pair(first, accepted[1])
    for connection in (first, second, *accepted.values()):
        connection.close()


def test_of_two_handshakes_for_one_rank_that_overlap_the_first_to_end_wins(listener: Listener) -> None:
    accepting = Accepting(listener, {1, 2})
    hellos = [_hello(1, 0), _hello(1, 0)]
    both = [_dial(listener.address) for _ in hellos]
    for connection, hello in zip(both, hellos, strict=True):
        connection.sendall(hello)
    nonces = [_read(connection, 64)[:32] for connection in both]
    both[0].sendall(_proof(SECRET, b"connector", hellos[0], nonces[0]))
    assert _read(both[0], 1) == b"\x01"
    both[1].sendall(_proof(SECRET, b"connector", hellos[1], nonces[1]))
    told = _read(both[1], 1)
    mine = connect(2, 0, listener.address, SECRET, _soon())
    accepted = accepting.result()
    assert told == b"", "two connections of one rank were accepted"
    _check_pair(both[0], accepted[1])
    for connection in (*both, mine, *accepted.values()):
        connection.close()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_flood_of_connections_neither_keeps_the_peers_out_nor_piles_up_descriptors(listener: Listener) -> None:
    accepting = Accepting(listener, {1, 2})
    before = _descriptors()
    most = 0

    def crowd(size: int) -> list[socket.socket]:
        """That many connections, all of which the listener has seen."""
        nonlocal most
        connections: list[socket.socket] = []
        for i in range(size):
            connections.append(_dial(listener.address))
            with contextlib.suppress(ConnectionError):
                connections[-1].sendall(_hello(1, 0)[: i % 48])
            if i % 50 == 49:
                last = _dial(listener.address)
                last.sendall(b"garbage")
                assert _is_dropped(last)
        most = max(most, _descriptors() - before - size)
        return connections

    for _ in range(20):
        for connection in crowd(100):
            connection.close()
    idle = crowd(300)  # more than the listener keeps
    _join(accepting, listener, 1, 2)
    for connection in idle:
        connection.close()
    assert most <= 160, f"the listener held {most} descriptors"
    assert _descriptors() <= before


def test_a_closed_listener_refuses_connections(listener: Listener) -> None:
    _join(Accepting(listener, {1}), listener, 1)
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        _dial(listener.address)


def test_names_of_unix_listeners_cannot_be_guessed_and_differ() -> None:
    listeners = [Listener(0, "unix") for _ in range(8)]
    names = {str(listener.address) for listener in listeners}
    assert len(names) == 8
    assert all(name.startswith("pypipe-") and len(name) >= len("pypipe-") + 32 for name in names)
    for listener in listeners:
        listener.close()


def test_a_tcp_listener_binds_only_the_address_that_it_was_given() -> None:
    listener = Listener(0, "127.0.0.1")
    assert isinstance(listener.address, tuple)
    assert listener.address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", listener.address[1]), LONG)
    listener.close()


def test_a_deadline_that_passes_is_an_error_that_names_the_ranks_that_did_not_come(listener: Listener) -> None:
    with pytest.raises(PipelineTimeout, match=r"rank 0 .*rank 1, 3"):
        listener.accept({1, 3}, SECRET, _soon(0.05))


def test_ranks_that_came_before_the_deadline_are_let_go_when_another_does_not_come(listener: Listener) -> None:
    accepting = Accepting(listener, {1, 2}, seconds=1.0)
    mine = connect(1, 0, listener.address, SECRET, _soon())
    with pytest.raises(PipelineTimeout, match=r"rank 2$"):
        accepting.result()
    mine.settimeout(LONG)
    assert _is_dropped(mine)


def test_connecting_to_nobody_ends_at_the_deadline_and_names_both_ranks() -> None:
    gone = Listener(0, "127.0.0.1")
    gone.close()
    for address in (gone.address, "pypipe-nobody"):
        with pytest.raises(PipelineTimeout, match=r"rank 3 could not connect to rank 0"):
            connect(3, 0, address, SECRET, _soon(0.1))


def _impostor(answer: Callable[[socket.socket], Any]) -> tuple[tuple[str, int], threading.Thread, socket.socket]:
    """Listens in the place of rank 0, and answers every connection in its own way."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return server.getsockname()[:2], thread, server


def _stop(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    server.close()


def test_a_listener_that_does_not_know_the_secret_is_not_trusted() -> None:
    heard: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        hello = _read(connection, 48)
        nonce = secrets.token_bytes(32)
        connection.sendall(nonce + _proof(b"x" * 32, b"acceptor", hello, nonce))
        heard.append(_read(connection, 1))

    address, _, server = _impostor(answer)
    with pytest.raises(PipelineTimeout, match="does not know this pipeline's secret"):
        connect(1, 0, address, SECRET, _soon(0.2))
    _stop(server)
    assert set(heard) == {b""}, "the connector proved itself to an impostor"


def test_a_listener_that_echoes_a_peers_own_words_is_not_trusted() -> None:
    def answer(connection: socket.socket) -> None:
        while data := connection.recv(100):
            connection.sendall(data + data)

    address, _, server = _impostor(answer)
    with pytest.raises(PipelineTimeout, match="rank 1 could not connect to rank 0"):
        connect(1, 0, address, SECRET, _soon(0.2))
    _stop(server)


def test_a_listener_that_says_nothing_is_given_up_at_the_deadline() -> None:
    address, _, server = _impostor(lambda connection: _read(connection, 1 << 20))
    with pytest.raises(PipelineTimeout, match="rank 1 could not connect to rank 0"):
        connect(1, 0, address, SECRET, _soon(0.2))
    _stop(server)


def test_a_listener_that_answers_byte_by_byte_cannot_stretch_the_deadline() -> None:
    sent = 0
    pause = threading.Event()

    def answer(connection: socket.socket) -> None:
        nonlocal sent
        while sent < 64:
            pause.wait(0.05)
            connection.sendall(b"x")
            sent += 1

    address, _, server = _impostor(answer)
    with pytest.raises(PipelineTimeout):
        connect(1, 0, address, SECRET, _soon(0.2))
    _stop(server)
    assert sent < 64, "the connector listened until the last byte, long after its deadline"
