"""Threads that wait for the Works of torch.distributed, and that end before the interpreter does.

A Work can be waited for but not interrupted, so another thread waits for it. When a pipeline fails, that thread may be
left with a Work that never ends, of a message that no rank will receive. It must not outlive the interpreter:
Python would end the thread inside torch's code, which aborts the process. So when the script is over, such a wait is
ended by force: it is given a timeout, at which the backend (gloo) closes its connections. That is not done earlier,
since the process group belongs to the user, and lives on after a failed step.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import queue
import threading
import time
import weakref
from typing import Any, Protocol

__all__ = ["Awaited", "Waiter", "close_at_exit"]

_CLOSING_SECONDS = 1.0
_ENDING_SECONDS = 5.0  # for all threads together, at the end of the script
_FOR_EVER = datetime.timedelta(days=365)
_AT_ONCE = datetime.timedelta(milliseconds=1)


class Awaited(Protocol):
    """What is notified of a Work's end."""

    def fail(self, error: Exception) -> None:
        """The Work has failed; end() follows."""

    def end(self) -> None:
        """The Work has ended."""


class Waiter:
    """A thread that waits for Works, one after the other, in the order given."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Any, Awaited] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._work: Any = None  # that is being waited for

    def submit(self, work: Any, awaited: Awaited) -> None:
        """Waits for a Work in the thread, and tells `awaited`.

        Raises:
            RuntimeError: the script is over.
        """
        if self._thread is None:
            if _over:
                raise RuntimeError("the script is over: nothing waits for transfers of torch.distributed any more")
            self._thread = threading.Thread(target=self._run, name="pypipe-c10d", daemon=True)
            self._thread.start()
        self._jobs.put((work, awaited))

    def close(self, *, join: bool) -> None:
        """Lets the thread end with its last Work; with `join`, waits for that, for a moment."""
        self._jobs.put(None)
        if self._thread is not None and join:
            self._thread.join(_CLOSING_SECONDS)

    def end(self, deadline: float) -> None:
        """Ends the thread, by force where it waits for a Work. Only when the script is over.

        Args:
            deadline: of time.monotonic(), in seconds.
        """
        thread = self._thread
        if thread is None:
            return
        self._jobs.put(None)
        thread.join(0.01)  # a thread that has nothing to wait for ends in a moment
        while thread.is_alive() and time.monotonic() < deadline:
            work = self._work
            if work is not None:
                # Some backends do not look at the timeout of a wait: this one must not last either.
                force = threading.Thread(target=_interrupt, args=(work,), name="pypipe-c10d-end", daemon=True)
                force.start()
                force.join(max(0.0, deadline - time.monotonic()))
            thread.join(0.01)

    def _run(self) -> None:
        _running.add(self)
        try:
            while (job := self._jobs.get()) is not None:
                self._work, awaited = job
                try:
                    # Not the group's own timeout: when that passes, the backend closes its connections for all.
                    self._work.wait(_FOR_EVER)
                except Exception as error:
                    awaited.fail(error)
                self._work = None
                awaited.end()
                del job, awaited  # nothing stays alive while there is nothing to do
        finally:
            _running.discard(self)


def _interrupt(work: Any) -> None:
    with contextlib.suppress(Exception):
        work.wait(_AT_ONCE)


class _Closes(Protocol):
    def close(self) -> None: ...


_running: set[Waiter] = set()
_ports: weakref.WeakSet[_Closes] = weakref.WeakSet()
_over = False


def close_at_exit(port: _Closes) -> None:
    """Has the port closed when the script is over, and before its threads are ended."""
    _ports.add(port)


def _end_all() -> None:
    global _over
    for port in list(_ports):
        with contextlib.suppress(Exception):
            port.close()
    _over = True
    deadline = time.monotonic() + _ENDING_SECONDS
    for waiter in list(_running):
        waiter.end(deadline)


def _forget_all() -> None:
    _running.clear()
    _ports.clear()


# Registered at import, which comes before what a script registers: that still finds the process group as it was.
atexit.register(_end_all)
# A forked child has neither the threads nor the connections.
os.register_at_fork(after_in_child=_forget_all)
