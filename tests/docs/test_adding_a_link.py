"""The toy link of docs/adding-a-link.md: one file and one entry, in a copy of the package, carry a whole training."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from search_path import ROOT

import pypipe

PAGE = (ROOT / "docs" / "adding-a-link.md").read_text()
_TRAINING = """
import torch, torch.distributed as dist, pypipe
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
whole = torch.nn.Sequential(*(torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)))
x, y = torch.randn(2, 8, 4, dtype=torch.float64)
stage = pypipe.PipelineStage(whole[rank], rank, 2, torch.device("cpu"))
with pypipe.Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss) as schedule:
    schedule.step(x, target=y)
    assert set(schedule._pipeline._running.connection.carried_by.values()) == {"slow"}
found = whole[rank].weight.grad.clone()
whole.zero_grad()
torch.nn.functional.mse_loss(whole(x), y).backward()
torch.testing.assert_close(found, whole[rank].weight.grad, rtol=1e-12, atol=1e-14)
dist.destroy_process_group()
"""


@pytest.mark.timeout(120)
def test_one_file_and_one_entry_make_a_link(tmp_path: Path) -> None:
    package = tmp_path / "pypipe"
    shutil.copytree(Path(pypipe.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    links = package / "runtime" / "transport" / "links"
    made = re.search(r"<!-- test: link (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    change = re.search(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    assert made is not None
    assert change is not None
    (links / f"{made[1]}.py").write_text(made[2])
    registry = (links / "registry.py").read_text()
    (context, added, old, new) = change[1].splitlines()
    for before, after in ((context[1:], f"{context[1:]}\n{added[1:]}"), (old[1:], new[1:])):
        assert registry.count(before) == 1, before
        registry = registry.replace(before, after)
    (links / "registry.py").write_text(registry)
    (tmp_path / "train.py").write_text(_TRAINING)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYPIPE_LINK": "slow"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
