"""Control sockets between ranks: found through the store, proven with a shared secret.

The pair's higher rank connects, the lower one accepts. Each proves that it knows the secret before the other believes
anything else it says::

    connector -> acceptor   MAGIC, connector's rank, acceptor's rank, nonce A
    acceptor  -> connector  nonce B, HMAC(secret, "acceptor", A, B, ranks)
    connector -> acceptor   HMAC(secret, "connector", A, B, ranks)
    acceptor  -> connector  one byte: accepted

A peer that sends anything else, or is too slow, is disconnected; the acceptor goes on waiting for its peers, and stops
listening when it has them all.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable

from pypipe.errors import PipelineTimeout

__all__ = ["Address", "Listener", "connect"]

Address = str | tuple[str, int]  # an abstract Unix name (without its leading NUL), or host and port

_MAGIC = b"pypipe1\n"
_HELLO = struct.Struct("<8sII32s")
_NONCE = 32
_MAC = 32
_MOST_STRANGERS = 128  # connections in mid-handshake; beyond that, the oldest is dropped
_STRANGER_SECONDS = 5.0
_RETRY_SECONDS = 0.02


def _mac(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + hello + nonce, "sha256")


def _prepare(connection: socket.socket) -> socket.socket:
    """Makes small frames go out at once, and a host that vanishes silently be noticed."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setblocking(False)
    return connection


class _Stranger:
    """A connection that has not proven itself yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline = time.monotonic() + _STRANGER_SECONDS
        self.received = b""
        self.hello = b""
        self.nonce = b""
        self.rank = -1

    def wants(self) -> int:
        return (_MAC if self.hello else _HELLO.size) - len(self.received)


class Listener:
    """Where the ranks above this one connect.

    Args:
        rank: this rank.
        address: "unix" for an abstract Unix socket of a random name, else the local host address to bind (TCP).
    """

    def __init__(self, rank: int, address: str) -> None:
        self._rank = rank
        if address == "unix":
            name = f"pypipe-{secrets.token_hex(16)}"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            self._socket.bind("\0" + name)
            self.address: Address = name
        else:
            family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
            self._socket.bind(where)
            host, port = self._socket.getsockname()[:2]
            self.address = (host, port)
        self._socket.listen(_MOST_STRANGERS)
        self._socket.setblocking(False)

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()

    def accept(
        self, expected: set[int], secret: bytes, deadline: float, check: Callable[[], None] = lambda: None
    ) -> dict[int, socket.socket]:
        """Waits until every expected rank has connected and proven itself.

        Args:
            expected: the ranks.
            secret: what they must know.
            deadline: on time.monotonic()'s clock.
            check: called now and then while no rank comes; may raise.

        Raises:
            PipelineTimeout: some did not come in time; the message names them.
        """
        accepted: dict[int, socket.socket] = {}
        strangers: dict[socket.socket, _Stranger] = {}
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)

                def drop(stranger: _Stranger) -> None:
                    selector.unregister(stranger.connection)
                    del strangers[stranger.connection]
                    stranger.connection.close()

                while expected - accepted.keys():
                    now = time.monotonic()
                    if now >= deadline:
                        missing = ", ".join(map(str, sorted(expected - accepted.keys())))
                        raise PipelineTimeout(f"rank {self._rank} waited in vain for a connection from rank {missing}")
                    for late in [s for s in strangers.values() if now >= s.deadline]:
                        drop(late)
                    ready = selector.select(min(0.1, deadline - now))
                    if not ready:
                        check()
                    for key, _ in ready:
                        if key.fileobj is self._socket:
                            with contextlib.suppress(OSError):
                                connection, _ = self._socket.accept()
                                if len(strangers) >= _MOST_STRANGERS:
                                    drop(next(iter(strangers.values())))
                                strangers[connection] = _Stranger(_prepare(connection))
                                selector.register(connection, selectors.EVENT_READ, strangers[connection])
                            continue
                        stranger: _Stranger = key.data
                        if stranger.connection not in strangers:
                            continue  # dropped since select() returned
                        verdict = self._hear(stranger, expected - accepted.keys(), secret)
                        if verdict is False:
                            drop(stranger)
                        elif verdict is True:
                            selector.unregister(stranger.connection)
                            del strangers[stranger.connection]
                            accepted[stranger.rank] = stranger.connection
            return accepted
        except BaseException:
            for connection in accepted.values():
                connection.close()
            raise
        finally:
            for stranger in strangers.values():
                stranger.connection.close()

    def _hear(self, stranger: _Stranger, expected: set[int], secret: bytes) -> bool | None:
        """True: proven. False: to be dropped. None: more to come."""
        try:
            data = stranger.connection.recv(stranger.wants())
        except BlockingIOError:
            return None
        except OSError:
            return False
        if not data:
            return False
        stranger.received += data
        if not stranger.hello and not _MAGIC.startswith(stranger.received[: len(_MAGIC)]):
            return False
        if stranger.wants() > 0:
            return None
        received, stranger.received = stranger.received, b""
        try:
            if stranger.hello:
                if not hmac.compare_digest(received, _mac(secret, b"connector", stranger.hello, stranger.nonce)):
                    return False
                # Another connection of this rank may have been faster.
                return stranger.rank in expected and stranger.connection.send(b"\x01") == 1
            _, rank, me, _ = _HELLO.unpack(received)
            if me != self._rank or rank not in expected:
                return False
            stranger.rank, stranger.hello, stranger.nonce = rank, received, secrets.token_bytes(_NONCE)
            answer = stranger.nonce + _mac(secret, b"acceptor", received, stranger.nonce)
            return None if stranger.connection.send(answer) == len(answer) else False
        except OSError:
            return False


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end answers too slowly")
        connection.settimeout(left)
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed in mid-handshake")
        data += part
    return data


def connect(rank: int, peer: int, address: Address, secret: bytes, deadline: float) -> socket.socket:
    """Connects to a lower rank's listener and proves this rank to it.

    Raises:
        PipelineTimeout: the peer could not be reached, or does not know the secret.
    """
    last: Exception | None = None
    while (left := deadline - time.monotonic()) > 0:
        family = (
            socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        )
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(left)
            connection.connect("\0" + address if isinstance(address, str) else address)
            hello = _HELLO.pack(_MAGIC, rank, peer, secrets.token_bytes(_NONCE))
            connection.sendall(hello)
            answer = _receive(connection, _NONCE + _MAC, deadline)
            nonce, proof = answer[:_NONCE], answer[_NONCE:]
            if not hmac.compare_digest(proof, _mac(secret, b"acceptor", hello, nonce)):
                raise ConnectionError(f"what listens at {address} does not know this pipeline's secret")
            connection.sendall(_mac(secret, b"connector", hello, nonce))
            _receive(connection, 1, deadline)
            return _prepare(connection)
        except OSError as error:
            connection.close()
            last = error
            time.sleep(min(_RETRY_SECONDS, max(deadline - time.monotonic(), 0)))
        except BaseException:
            connection.close()
            raise
    raise PipelineTimeout(f"rank {rank} could not connect to rank {peer} at {address}: {last}")
