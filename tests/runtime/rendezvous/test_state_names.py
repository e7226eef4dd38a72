"""Stages with `state_dict` keys in common: torch.distributed.checkpoint would keep one tensor of each name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rank_pool import RankPool
from state_names_cases import warned


@pytest.mark.parametrize(
    ("schedule", "kind", "key"),
    [
        ("Schedule1F1B", "alike", "'0.weight'"),
        ("Schedule1F1B", "large", "'p"),
        ("Schedule1F1B", "one", "'shared'"),
        ("ScheduleZBVZeroBubble", "alike", "'0.weight'"),
    ],
)
def test_a_clash_is_warned_of_once(ranks: RankPool, schedule: str, kind: str, key: str) -> None:
    for first, second in ranks.run(2, warned, schedule, kind, 2):
        assert second == []
        ((text, file),) = first
        assert text.startswith("stages 0 and 1 both have " + key)
        assert "PipelineStage(..., prefix=" in text
        assert file.endswith("state_names_cases.py")  # the line that called step()


@pytest.mark.parametrize(("kind", "key"), [("one", "'shared'"), ("wrapped", "'0.weight'")])
def test_stages_of_one_rank_clash_too(ranks: RankPool, kind: str, key: str) -> None:
    (((text, _),),) = ranks.run(1, warned, "ScheduleInterleaved1F1B v=2", kind, 1)[0]
    assert text.startswith(f"stages 0 and 1 both have {key}")


@pytest.mark.parametrize("kind", ["none", "renamed"])
def test_stages_with_names_of_their_own_are_not_warned_of(ranks: RankPool, kind: str) -> None:
    assert ranks.run(2, warned, "Schedule1F1B", kind, 1) == [[[]], [[]]]


def test_two_copies_of_a_stage_do_not_clash(ranks: RankPool) -> None:
    assert ranks.run(2, warned, "ScheduleDualPipe", "none", 1) == [[[]], [[]]]


SCRIPT = """
import sys, warnings
import torch
import torch.distributed as dist
from pypipe import PipelineStage, ScheduleInterleaved1F1B

warnings.simplefilter("error")
dist.init_process_group("gloo")
stages = [PipelineStage(torch.nn.Linear(4, 4), n, 2, torch.device("cpu")) for n in range(2)]
with ScheduleInterleaved1F1B(stages, 2, loss_fn=torch.nn.functional.mse_loss) as schedule:
    for _ in range(2):
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
assert "torch.distributed.checkpoint" not in sys.modules
before = list(sys.meta_path)
warnings.simplefilter("always")
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
assert sys.meta_path == before[1:]
dist.destroy_process_group()
"""


def test_a_script_without_checkpoints_is_not_warned_until_it_imports_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.lstrip("\n"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run([*launcher, script], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    (warned,) = [line for line in done.stderr.splitlines() if "NameClashWarning" in line and "train.py" in line]
    assert "train.py:15: NameClashWarning: stages 0 and 1 both have 'weight'" in warned
