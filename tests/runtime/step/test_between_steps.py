"""What the ranks decide together between steps, where torchrun's environment is all that they have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from search_path import PYTHONPATH

SCRIPT = Path(__file__).with_name("between_steps_script.py")


def _run(case: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(SCRIPT), case],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_ranks_without_a_process_group_agree() -> None:
    first, second = _run("train")
    assert first.startswith("norm ")
    assert first == second


def test_a_rank_that_dies_ends_the_others_wait() -> None:
    (said,) = _run("dies")
    assert said.startswith("PeerLost")
    assert "rank 1" in said
