"""torchtitan's own trainer computes with pypipe behind it what it computes with torch's pipelining."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torchtitan_cases
from rank_pool import RankPool

import pypipe.program

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan, of the extra `clients`, is not installed", allow_module_level=True)
pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

SINGLE = ["GPipe", "1F1B"]
LOOPED = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
IN_A_V = ["ZBVZeroBubble", "DualPipeV"]
SPLIT_BACKWARD = ["InterleavedZeroBubble", *IN_A_V]

Found = tuple[list[dict[str, Any]], list[dict[str, Any]]]
Both = Callable[..., Found]


@pytest.fixture(scope="module")
def _pool() -> Iterator[Callable[[str, int], RankPool]]:
    """Names are imported once in a process, so each library has ranks of its own; torchtitan trains on all that are."""
    pools: dict[tuple[str, int], RankPool] = {}

    def pool_of(lib: str, size: int) -> RankPool:
        if (lib, size) not in pools:
            pools[lib, size] = RankPool(size, {"PIPELINING_OF_TORCHTITAN": lib})
        return pools[lib, size]

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture
def both(_pool: Callable[[str, int], RankPool], tmp_path: Path) -> Both:
    """Trains with either library; what each found, by rank."""

    def run(schedule: str, *, pp: int = 2, fsdp: int = 1, torchs: dict[str, Any] | None = None, **options: Any) -> Any:
        given = {"pp": pp, "fsdp": fsdp, **options}
        return tuple(
            _pool(lib, pp * fsdp).run(pp * fsdp, torchtitan_cases.train, str(tmp_path), schedule, its, timeout=200.0)
            for lib, its in (("pypipe", given), ("torch", given | (torchs or {})))
        )

    return run


def _check(found: Found) -> None:
    for rank, (mine, theirs) in enumerate(zip(*found, strict=True)):
        assert mine["class"] == "pypipe.compat.schedules"
        assert theirs["class"] == "torch.distributed.pipelining.schedules"
        for what in ("losses", "norms", "parameters"):
            assert mine[what] == pytest.approx(theirs[what], rel=1e-5), f"rank {rank}: {what}"
    losses = max((mine["losses"] for mine in found[0]), key=max)
    assert len(set(losses)) == len(losses) >= 2, "it trained"


@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("schedule", [*SINGLE, *LOOPED, *IN_A_V])
def test_losses_norms_and_parameters_are_torchs(both: Both, schedule: str, fsdp: int) -> None:
    # torch's split backward raises under selective activation checkpointing, which does not change what is computed.
    torchs = {"recompute": schedule not in SPLIT_BACKWARD}
    _check(both(schedule, fsdp=fsdp, torchs=torchs))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_loss_that_runs_its_backward_chunk_by_chunk(both: Both, schedule: str) -> None:
    # With torch's split backward this loss gives other gradients than the same loss computed whole.
    whole = {"chunked": False, "recompute": False}
    _check(both(schedule, chunked=True, torchs=whole if schedule in SPLIT_BACKWARD else None))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_validation_runs_in_between(both: Both, schedule: str) -> None:
    _check(both(schedule, validate=True))


def test_a_program_of_a_csv_file(both: Both, tmp_path: Path) -> None:
    path = tmp_path / "looped.csv"
    pypipe.program.dump_csv(pypipe.program.build("interleaved", 2, 4, stages_per_rank=2), path)
    _check(both("PipelineScheduleMulti", csv=str(path)))


def test_torchtitan_imported_too_early_is_named() -> None:
    text = """
import torchtitan.distributed.pipeline_parallel
import pypipe.compat
try:
    pypipe.compat.install()
except pypipe.ConfigurationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-P", "-c", text], capture_output=True, text=True, timeout=120)
    assert "comes too late" in done.stdout, done.stdout + done.stderr
    assert "torchtitan.distributed.pipeline_parallel (PipelineScheduleMulti, " in done.stdout
