"""Rank processes that run functions on request.

A function runs as `function(rank, size, group, *args)` on every rank at once, with a process group of just these
ranks. Whatever a rank raises is returned as it is, so that a test can look at every rank's error. A rank that does
not answer in time, or dies, costs the pool its processes: the next run starts new ones.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from search_path import ROOT


@dataclasses.dataclass
class Raised:
    """What a rank raised."""

    error: BaseException
    text: str


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _serve(rank: int, size: int, folder: str, environment: dict[str, str], pipe: Connection) -> None:
    os.environ.update(environment)
    # Functions of test modules arrive as `tests.test_...`. Last on the path: pypipe is the installed one.
    sys.path.append(str(ROOT))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), size)  # type: ignore[attr-defined]  # public, not in __all__
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            os._exit(0)
        function, count, arguments = request
        try:
            result = function(rank, count, groups[count], *arguments)
        except BaseException as error:
            result = Raised(_portable(error), traceback.format_exc())
        pipe.send(result)


class RankPool:
    """Up to `size` ranks, with these variables in their environment.

    They are forks of a process that has imported torch, which takes seconds, and runs nothing (not even a thread).

    Args:
        size: how many.
        environment: the variables.
    """

    def __init__(self, size: int, environment: dict[str, str] | None = None) -> None:
        self._size = size
        self._environment = environment or {}
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, once they run."""
        return [process.pid for process in self._processes]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pypipe-test-")
        context = multiprocessing.get_context("forkserver")
        # Not pypipe: the server looks for modules where it was started, and the clone's pypipe has no core.
        context.set_forkserver_preload(["torch.distributed"])
        for rank in range(self._size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._size, self._folder.name, self._environment, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def run_raw(self, count: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """Runs the function on ranks 0..count-1; results by rank, a Raised where one raised."""
        if not self._processes:
            self._start()
            timeout += 60.0  # importing torch
        pending: dict[Connection, int] = {}
        for rank in range(count):
            self._pipes[rank].send((function, count, arguments))
            pending[self._pipes[rank]] = rank
        results: list[Any] = [None] * count
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), max(deadline - time.monotonic(), 0))
            if not ready:
                late = sorted(pending.values())
                self.close()
                raise AssertionError(f"ranks {late} hang: no answer within {timeout:g} s; the others: {results}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    results[rank] = Raised(RuntimeError(f"rank {rank} died"), "")
        if any(isinstance(result, Raised) and str(result.error).endswith("died") for result in results):
            self.close()
        return results

    def run(self, count: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """As run_raw(), but fails where a rank raised."""
        results = self.run_raw(count, function, *arguments, timeout=timeout)
        raised = [
            f"rank {rank} raised:\n{result.text}" for rank, result in enumerate(results) if isinstance(result, Raised)
        ]
        if raised:
            self.close()  # the ranks are no longer at the same place, which would be the next test's failure
        assert not raised, "\n".join(raised)
        return results
