"""Local rank processes: started together, heard over a pipe each, and gone when the `with` block ends.

torch.multiprocessing.start_processes() does less: it hears of failures only, kills the others at the first of them, so
that they cannot say what they know of it, and leaves processes behind whose parent was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any

# Seconds. Once one rank has failed, how long the others may take to tell what they know of it.
_GRACE = 2.0

# Seconds without a word from any rank after which the run counts as stuck.
_SILENCE = 300.0

_LOG_LINES = 40


class RankError(RuntimeError):
    """A rank raised, died or hung. The message is one line; `log` is the end of what the rank printed."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class _Raised:
    """A rank's last message when its target raised. `at` is time.monotonic(), one clock for all processes."""

    at: float
    kind: str


class Ranks:
    """P processes that each run `target(rank, report, *arguments)`.

    The ranks' stdout and stderr go to files in `scratch`, so that they disturb neither the caller's output
    nor its progress bar; the end of a failing rank's file comes with its error, traceback included. The ranks
    are deaf to Ctrl-C, which a terminal sends to every process: the parent alone hears it, and ends them. A
    rank whose parent dies ends by itself.

    Args:
        target: importable by name, as multiprocessing's "spawn" starts the ranks; `report(message)` sends any
            picklable message to the parent.
        size: P.
        arguments: passed on to the target; small, since starting a rank waits until it has read them.
        scratch: an existing folder for the ranks' output.
    """

    def __init__(self, target: Callable[..., None], size: int, arguments: tuple[object, ...], scratch: Path) -> None:
        self._target = target
        self._size = size
        self._arguments = arguments
        self._scratch = scratch
        self._processes: list[SpawnProcess] = []
        self._readers: list[Connection[Any, Any]] = []

    def __enter__(self) -> Ranks:
        _open_standard_streams()
        # The tracker comes first because its start, else a part of the first process's, unblocks SIGINT.
        resource_tracker.ensure_running()
        # A blocked signal stays blocked in the processes that are spawned, and waits in this one.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(self._size):
                self._start(rank)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # a Ctrl-C that has waited is raised here
        except BaseException:
            self._end()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def reports(self) -> Iterator[tuple[int, Any]]:
        """Yields (rank, message) as messages come, until every rank has ended well.

        Raises:
            RankError: a rank raised, died, or no rank sent anything for five minutes.
        """
        listening = {reader: rank for rank, reader in enumerate(self._readers)}
        while listening:
            ready = wait(list(listening), timeout=_SILENCE)
            if not ready:
                raise RankError(f"no rank has reported for {_SILENCE:.0f} s: ended the run")
            for reader in ready:
                assert isinstance(reader, Connection)
                rank = listening[reader]
                message = _receive(reader)
                if message is None:
                    del listening[reader]
                    self._processes[rank].join(_GRACE)
                    if self._processes[rank].exitcode != 0:
                        raise self._failure({}, listening)
                elif isinstance(message, _Raised):
                    del listening[reader]
                    raise self._failure({rank: message}, listening)
                else:
                    yield rank, message

    def _start(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        reader, writer = context.Pipe(duplex=False)
        self._readers.append(reader)
        process = context.Process(
            target=_run_rank,
            args=(self._target, rank, writer, self._log_path(rank), self._arguments),
            name=f"pypipe rank {rank}",
            daemon=True,
        )
        with writer:  # the rank has its own copy: when that one closes, the reader sees the end
            process.start()
        self._processes.append(process)

    def _failure(self, raised: dict[int, _Raised], listening: dict[Connection[Any, Any], int]) -> RankError:
        """Hears the other ranks out, then names the first cause.

        A rank that died without a word comes before any that raised, which may only have noticed its death;
        among those that raised, the earliest is taken.
        """
        deadline = time.monotonic() + _GRACE
        while listening and (left := deadline - time.monotonic()) > 0:
            for reader in wait(list(listening), timeout=left):
                assert isinstance(reader, Connection)
                message = _receive(reader)
                if message is None:
                    del listening[reader]
                elif isinstance(message, _Raised):
                    raised[listening.pop(reader)] = message
        for rank, process in enumerate(self._processes):
            if rank not in raised and rank not in listening.values():
                process.join(_GRACE)
                if process.exitcode != 0:
                    return RankError(f"rank {rank} {_fate(process.exitcode)}", self._log(rank))
        rank = min(raised, key=lambda one: raised[one].at)
        return RankError(f"rank {rank} raised {raised[rank].kind}", self._log(rank))

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_GRACE)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
        for reader in self._readers:
            reader.close()
        self._processes, self._readers = [], []

    def _log_path(self, rank: int) -> Path:
        return self._scratch / f"rank-{rank}.log"

    def _log(self, rank: int) -> str:
        try:
            text = self._log_path(rank).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:  # it died before it had opened the file
            return ""
        return "\n".join(text.splitlines()[-_LOG_LINES:])


def _receive(reader: Connection[Any, Any]) -> Any:
    """Returns the next message, or None if the rank's end of the pipe is closed, be it in mid-message."""
    try:
        return reader.recv()
    except (EOFError, OSError):
        return None


def _fate(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its pipe but did not end"
    if exitcode >= 0:
        return f"ended without an error but with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    if name == "SIGKILL":
        return "was killed by SIGKILL: if the machine ran out of memory, make the model or the batch smaller"
    return f"was killed by {name}"


def _open_standard_streams() -> None:
    """Puts /dev/null where a standard stream is closed, lest a pipe get its number and be taken for it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _run_rank(
    target: Callable[..., None],
    rank: int,
    writer: Connection[Any, Any],
    log: Path,
    arguments: tuple[object, ...],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    try:
        target(rank, writer.send, *arguments)
    except Exception as error:
        at = time.monotonic()
        traceback.print_exc()
        writer.send(_Raised(at, type(error).__name__))
        sys.exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
