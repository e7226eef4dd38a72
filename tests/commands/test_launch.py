"""Local rank processes: whatever happens to one or to their parent, it is told once, and all are gone.

Each test runs a small program of its own, so that signals and deaths stay out of the test process.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

# Each rank reports its process number, waits for the word, and then does as the test says.
PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
from pypipe.commands.launch import RankError, Ranks

def wait_for_ever():
    threading.Event().wait()

def target(rank, report):
    report(os.getpid())
    while not Path("go").exists():
        time.sleep(0.01)
    {behaviour}

if __name__ == "__main__":
    try:
        with Ranks(target, 3, (), Path.cwd()) as ranks:
            for rank, message in ranks.reports():
                print(rank, message, flush=True)
    except RankError as error:
        print(error, error.log, sep="\\n", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
"""


class Launch:
    """A running program with three ranks."""

    def __init__(self, behaviour: str, folder: Path) -> None:
        self._folder = folder
        program = folder / "program.py"
        program.write_text(PROGRAM.replace("{behaviour}", behaviour))
        self.process = subprocess.Popen(
            [sys.executable, str(program)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def pids(self) -> dict[int, int]:
        """Waits until all ranks are up, and gives the word; returns their process numbers by rank."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().split() for _ in range(3)]
        (self._folder / "go").touch()
        return {int(rank): int(pid) for rank, pid in lines}

    def end(self) -> tuple[int, str]:
        """Waits for the parent to end; returns its exit code and stderr."""
        _, errors = self.process.communicate()
        return self.process.returncode, errors


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[list[Launch]]:
    """Launches put in here are killed if the test fails to end them."""
    launches: list[Launch] = []
    yield launches
    for launch in launches:
        with suppress(ProcessLookupError):
            os.killpg(launch.process.pid, signal.SIGKILL)
        launch.process.wait()


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_ranks_that_end_well_are_heard_to_the_end(tmp_path: Path, launched: list[Launch]) -> None:
    launched.append(Launch("report('last words')", tmp_path))
    launched[0].pids()
    output, errors = launched[0].process.communicate()
    assert launched[0].process.returncode == 0
    assert errors == ""
    assert sorted(output.splitlines()) == [f"{rank} last words" for rank in range(3)]


def test_a_rank_that_raises_ends_all_and_its_traceback_is_shown_once(tmp_path: Path, launched: list[Launch]) -> None:
    launched.append(Launch("raise ValueError('no such thing') if rank == 1 else wait_for_ever()", tmp_path))
    pids = launched[0].pids()
    code, errors = launched[0].end()
    assert code == 1
    assert errors.startswith("rank 1 raised ValueError\n")
    assert errors.count("Traceback") == errors.count("ValueError: no such thing") == 1
    assert all(gone(pid) for pid in pids.values())


def test_of_two_ranks_that_raise_the_first_is_named(tmp_path: Path, launched: list[Launch]) -> None:
    behaviour = """
    if rank == 2:
        raise ValueError("the cause")
    log = Path("rank-2.log")
    while "the cause" not in (log.read_text() if log.exists() else ""):
        time.sleep(0.01)
    raise OSError("a consequence")
"""
    launched.append(Launch(behaviour, tmp_path))
    launched[0].pids()
    code, errors = launched[0].end()
    assert code == 1
    assert errors.startswith("rank 2 raised ValueError\n")
    assert "a consequence" not in errors


@pytest.mark.parametrize("deed", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"], ids=["killed", "exits"])
def test_a_rank_that_dies_is_named_though_its_peers_complain_of_it(
    deed: str, tmp_path: Path, launched: list[Launch]
) -> None:
    behaviour = f"""
    if rank == 0:
        {deed}
    raise ConnectionError("rank 0 is gone")
"""
    launched.append(Launch(behaviour, tmp_path))
    pids = launched[0].pids()
    code, errors = launched[0].end()
    assert code == 1
    assert errors.startswith("rank 0 was killed by SIGKILL" if "kill" in deed else "rank 0 ended without an error")
    assert "Traceback" not in errors
    assert all(gone(pid) for pid in pids.values())


def test_what_a_dying_rank_printed_is_shown(tmp_path: Path, launched: list[Launch]) -> None:
    behaviour = "os.write(1, b'out of luck\\n') and os.abort() if rank == 2 else wait_for_ever()"
    launched.append(Launch(behaviour, tmp_path))
    launched[0].pids()
    code, errors = launched[0].end()
    assert code == 1
    assert errors.splitlines()[:2] == ["rank 2 was killed by SIGABRT", "out of luck"]


def test_ctrl_c_ends_all_without_a_traceback(tmp_path: Path, launched: list[Launch]) -> None:
    launched.append(Launch("wait_for_ever()", tmp_path))
    pids = launched[0].pids()
    os.killpg(launched[0].process.pid, signal.SIGINT)  # as a terminal does it
    assert launched[0].end() == (130, "")
    assert all(gone(pid) for pid in pids.values())


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path, launched: list[Launch]) -> None:
    launched.append(Launch("wait_for_ever()", tmp_path))
    pids = launched[0].pids()
    launched[0].process.kill()
    launched[0].process.wait()
    while not all(gone(pid) for pid in pids.values()):  # bounded by the test's timeout
        time.sleep(0.01)


def test_closed_standard_streams_are_not_mistaken_for_the_ranks_pipes(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("{behaviour}", "pass"))
    (tmp_path / "go").touch()
    command = f'"{sys.executable}" program.py <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path).returncode == 0
