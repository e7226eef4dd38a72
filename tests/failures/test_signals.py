"""One signal, or one exception, ends all ranks, each with the reason, in few lines, and nothing of theirs is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

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
def test_an_exception_that_ends_one_script_between_steps_is_told_to_the_others() -> None:
    ranks = _start("--raise")
    try:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [1, 1, 1]
    assert all("LookupError: the data are gone" in text for text in errors), "\n".join(errors)
    for other in (0, 2):
        assert "RemoteStageError" in errors[other], errors[other]
        assert "rank 1 failed at a line of its own script, outside step() and eval()" in errors[other], errors[other]


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
        for place in hit:
            os.kill(ranks[place].pid, number)
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for place, text in enumerate(errors):
        assert ranks[place].returncode != 0
        if place in hit:
            assert number is not signal.SIGINT or "KeyboardInterrupt" in text or "interrupted" in text, text
            continue
        assert all(words in text for words in told), f"rank {place}:\n{text}"
    assert all(len(text.splitlines()) <= 60 for text in errors), "\n".join(errors)
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.killpg(rank.pid, 0)


def _descendants(pid: int) -> list[int]:
    children = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [below for child in children for below in _descendants(child)]


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "pypipe" in name}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_under_torchrun_nothing_is_left(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes, SIGKILL one rank."""
    before = _shared_memory()
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    launcher = subprocess.Popen(
        [*command, signal_script.__file__, *(["--deaf"] if number is signal.SIGKILL else [])],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert launcher.stdout is not None
    try:
        for _ in range(RANKS):
            assert launcher.stdout.readline() == "training\n"
        ranks = _descendants(launcher.pid)
        if number is signal.SIGINT:
            os.killpg(launcher.pid, number)
        else:
            os.kill(ranks[-1], number)
        errors = launcher.communicate(timeout=120)[1]
    finally:
        launcher.kill()
        launcher.wait()
    assert len(ranks) >= RANKS
    for rank in ranks:
        for _ in range(400):  # one that outlived the launcher is init's to reap
            if not Path(f"/proc/{rank}").exists():
                break
            time.sleep(0.05)
        assert not Path(f"/proc/{rank}").exists(), f"rank process {rank} is left"
    # Each rank's own error, once. The launcher has a traceback too, and sends signals of its own to ranks that end.
    assert errors.count("schedule.step(batch, target=batch)") <= RANKS, errors
    assert number is not signal.SIGKILL or errors.count("is gone") == RANKS - 1, errors
    assert not [name for name in os.listdir(tmp_path) if "pypipe" in name]
    assert _shared_memory() <= before
