"""How a rank learns, before there are control sockets, that another has ended or lets it wait."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from pypipe.errors import PeerLost, PipelineTimeout
from pypipe.runtime.rendezvous import exchange, liveness
from pypipe.runtime.rendezvous.world import World

KEYS = {rank: f"config/{rank}" for rank in range(3)}


@pytest.fixture
def store(tmp_path: Path) -> dist.FileStore:  # type: ignore[name-defined]  # public, but not in __all__
    found = dist.FileStore(str(tmp_path / "store"), 3)  # type: ignore[attr-defined]
    found.set_timeout(timedelta(seconds=20))
    return found


def test_a_long_wait_says_once_for_whom(
    store: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(0, 3, store, None, "waiting")
    world.store.set(KEYS[0], "here")
    liveness.declare(World(2, 3, store, None, "waiting"))  # the third rank has got as far as its stage
    monkeypatch.setattr(exchange, "_NOTICE_SECONDS", 0.02)
    with pytest.raises(PipelineTimeout, match="waited for rank 1, 2 to start the same pipeline"):
        exchange.read_all(world, "first", KEYS, time.monotonic() + 0.3)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pypipe: rank 0 has waited 0 s for ")
    assert "rank 1 (has no PipelineStage yet), rank 2 (has not called step() or eval()) to start the same" in line


def test_a_short_wait_says_nothing(store: object, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(0, 3, store, None, "waiting")
    with pytest.raises(PipelineTimeout):
        exchange.read_all(world, "first", KEYS, time.monotonic() + 0.1)
    assert capsys.readouterr().err == ""


SCRIPT = """
import sys
import torch.distributed as dist
from pypipe.runtime.rendezvous import liveness
from pypipe.runtime.rendezvous.world import World

liveness._host = lambda: "another host"
world = World(1, 3, dist.FileStore(sys.argv[1], 3), None, "waiting")
liveness.declare(world)
if sys.argv[2] == "met":
    world.next_rendezvous()
raise RuntimeError("the data are gone")
"""


@pytest.mark.parametrize("how", ["alone", "met"])
def test_a_rank_on_another_host_says_that_it_ends_before_it_has_met_the_others(
    how: str, store: object, tmp_path: Path
) -> None:
    world = World(0, 3, store, None, "waiting")
    world.store.set(KEYS[0], "here")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), how]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "the data are gone" in done.stderr
    expected, words = (PeerLost, "has ended before") if how == "alone" else (PipelineTimeout, "waited for rank 1, 2")
    with pytest.raises(expected, match=words):
        exchange.read_all(world, "first", KEYS, time.monotonic() + (60 if how == "alone" else 0.3))
