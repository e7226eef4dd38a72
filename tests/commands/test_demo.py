"""`pypipe demo`: it learns, computes what the unpipelined model computes, and leaves no process behind."""

import dataclasses
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from pypipe.commands.demo.options import Options
from pypipe.commands.demo.training import train_unpipelined
from pypipe.program.drawing import read_chrome_trace

pytestmark = pytest.mark.timeout(240)

DEMO = [sys.executable, "-m", "pypipe", "demo"]

KEYS = {
    "schedule",
    "stages",
    "microbatches",
    "steps",
    "losses",
    "loss_max_abs_diff",
    "tokens_per_second",
    "unpipelined_tokens_per_second",
    "bubble_measured",
    "bubble_predicted",
}


def run_json(*arguments: str, cwd: Path) -> dict[str, Any]:
    """Runs the demo to its end, and returns the one line of JSON that is all its output."""
    result = subprocess.run(
        [*DEMO, "--json", *arguments], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1
    figures: dict[str, Any] = json.loads(result.stdout)
    assert set(figures) == KEYS
    return figures


def test_the_default_run_learns_and_matches_the_unpipelined_model(tmp_path: Path) -> None:
    figures = run_json(cwd=tmp_path)
    assert (figures["schedule"], figures["stages"]) == ("1f1b", 4)
    assert (figures["microbatches"], figures["steps"]) == (8, 60)
    losses = figures["losses"]
    assert len(losses) == 60
    assert losses[0] > 4
    assert fmean(losses[-10:]) < 2.8
    assert figures["loss_max_abs_diff"] < 1e-4
    assert figures["tokens_per_second"] > 0
    assert figures["unpipelined_tokens_per_second"] > 0
    assert 0 <= figures["bubble_measured"] < 1
    assert 0 < figures["bubble_predicted"] < 1


@pytest.mark.parametrize(
    ("stages", "microbatches", "blocks", "seed"), [(1, 1, 1, 5), (3, 2, 4, 0)], ids=["P=1", "M<P, uneven batch"]
)
def test_gpipe_on_a_file_matches_the_unpipelined_model_of_its_seed(
    stages: int, microbatches: int, blocks: int, seed: int, tmp_path: Path
) -> None:
    text = "Grüße aus der Pipeline!\r\n" * 40
    (tmp_path / "text").write_text(text, encoding="utf-8", newline="")
    figures = run_json(
        *("--schedule", "gpipe", "--stages", str(stages), "--microbatches", str(microbatches), "--text", "text"),
        *("--blocks", str(blocks), "--steps", "8", "--batch", "11", "--context", "16", "--width", "32"),
        *("--seed", str(seed)),
        cwd=tmp_path,
    )
    assert (figures["schedule"], figures["stages"], figures["steps"]) == ("gpipe", stages, 8)
    assert figures["losses"][-1] < figures["losses"][0]
    assert figures["loss_max_abs_diff"] < 1e-4
    assert (figures["bubble_predicted"] > 0) == (stages > 1)
    options = Options(stages, "gpipe", microbatches, steps=8, seed=seed, batch=11, context=16, blocks=blocks, width=32)
    assert figures["losses"] == pytest.approx(list(train_unpipelined(options, text)), abs=1e-4)
    another = list(train_unpipelined(dataclasses.replace(options, seed=seed + 1), text))
    assert figures["losses"] != pytest.approx(another, abs=1e-2)


@pytest.mark.parametrize("schedule", ["ZB-V", "dualpipe", "interleaved"])
def test_a_schedule_of_several_stages_a_rank_matches_the_unpipelined_model(schedule: str, tmp_path: Path) -> None:
    small = ("--stages", "2", "--microbatches", "4", "--batch", "6", "--context", "16", "--steps", "4")
    figures = run_json("--schedule", schedule, *small, cwd=tmp_path)
    assert figures["loss_max_abs_diff"] < 1e-4
    assert 0 < figures["bubble_predicted"] < 1


def test_where_stderr_is_no_terminal_it_says_now_and_then_what_it_does(tmp_path: Path) -> None:
    small = ("--stages", "2", "--microbatches", "2", "--batch", "4", "--context", "16", "--steps", "2")
    result = subprocess.run([*DEMO, *small], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    for line in ("pipelined: step 0 of 2: starting 2 ranks", "unpipelined: step 0 of 2: starting"):
        assert line in result.stderr.splitlines()
    assert "pypipe plan -p 2 -m 2" in result.stdout


def test_a_traced_run_writes_the_last_step_and_divides_its_bubble(tmp_path: Path) -> None:
    small = ("--stages", "2", "--microbatches", "3", "--batch", "3", "--steps", "2", "--trace", "step.json")
    result = subprocess.run([*DEMO, *small], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for part in ("warm-up and cool-down", "imbalance", "exposed transfer"):
        assert sum(part in line and line.endswith("%") for line in lines) == 1, result.stdout
    measured, predicted = read_chrome_trace((tmp_path / "step.json").read_text())
    assert (measured.title, predicted.title) == ("1f1b, measured", "1f1b, predicted")
    assert [len(events) for events in measured.timeline.ranks] == [6, 6]


class Watched:
    """A long demo whose stderr is a terminal."""

    def __init__(self, cwd: Path) -> None:
        self._terminal, stderr = pty.openpty()
        self.process = subprocess.Popen(
            [*DEMO, "--stages", "2", "--steps", "1000000"],
            cwd=cwd,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "120", "TMPDIR": str(cwd)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        os.close(stderr)

    def read_until(self, text: str | None) -> str:
        """Reads the terminal until the text has come; with None, until nobody is left who could write."""
        seen = b""
        while text is None or text.encode() not in seen:
            try:
                seen += os.read(self._terminal, 65536)
            except OSError:  # Linux ends a terminal so
                assert text is None, seen.decode()
                break
        return seen.decode()

    def ranks(self) -> list[int]:
        """The ranks' process numbers, in their order."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(each) for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]

    def close(self) -> None:
        """Kills what a failed test has left."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """A demo in the midst of its training, its progress bar up."""
    demo = Watched(tmp_path)
    try:
        assert "loss" in demo.read_until("predicted")
        yield demo
    finally:
        demo.close()


def assert_nothing_is_left(ranks: list[int], folder: Path) -> None:
    """The ranks have been waited for, and the scratch folder is gone."""
    assert len(ranks) == 2
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    assert not list(folder.glob("pypipe-demo-*"))


def test_a_killed_rank_ends_the_demo_with_one_error(watched: Watched, tmp_path: Path) -> None:
    ranks = watched.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    shown = watched.read_until(None)
    output, _ = watched.process.communicate()
    assert watched.process.returncode == 1
    assert output == b""
    assert shown.count("Error: rank 1 was killed by SIGKILL") == 1
    assert "Traceback" not in shown
    assert_nothing_is_left(ranks, tmp_path)


def test_ctrl_c_ends_the_demo_without_a_traceback(watched: Watched, tmp_path: Path) -> None:
    ranks = watched.ranks()
    os.killpg(watched.process.pid, signal.SIGINT)  # as a terminal does it
    shown = watched.read_until(None)
    output, _ = watched.process.communicate()
    assert watched.process.returncode == 1
    assert output == b""
    assert "Aborted!" in shown
    assert "Traceback" not in shown
    assert_nothing_is_left(ranks, tmp_path)
