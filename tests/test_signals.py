"""One signal ends all ranks, each with the reason, in few lines, and nothing of theirs is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
import signal_script

RANKS = 3


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _start(*arguments: str) -> list[subprocess.Popen[str]]:
    """Ranks that are in the middle of training."""
    together = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", signal_script.__file__, *arguments],
            env={**os.environ, **together, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(RANKS)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "training\n"
    return ranks


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("arguments", "number", "hit", "told"),
    [
        ([], signal.SIGINT, [0, 1, 2], []),
        ([], signal.SIGINT, [2], ["was interrupted (KeyboardInterrupt)"]),
        ([], signal.SIGTERM, [1], ["rank 1 is gone"]),
        ([], signal.SIGKILL, [0], ["rank 0 is gone"]),
        (["--wait"], signal.SIGINT, [0, 1, 2], []),
        (["--wait"], signal.SIGTERM, [1], ["rank 1 is gone"]),
    ],
    ids=["ctrl-c", "ctrl-c on one", "terminated", "killed", "ctrl-c while two wait", "terminated while two wait"],
)
def test_one_signal_ends_all_ranks(
    arguments: list[str], number: signal.Signals, hit: list[int], told: list[str]
) -> None:
    ranks = _start(*arguments)
    try:
        for rank in hit:
            os.kill(ranks[rank].pid, number)
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, text in enumerate(errors):
        assert ranks[rank].returncode != 0
        if rank in hit:
            assert number is not signal.SIGINT or "KeyboardInterrupt" in text or "interrupted" in text, text
            continue
        assert all(words in text for words in told), f"rank {rank}:\n{text}"
    assert all(len(text.splitlines()) <= 60 for text in errors), "\n".join(errors)
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.killpg(rank.pid, 0)
