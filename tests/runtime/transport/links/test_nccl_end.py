"""How a pipeline over NCCL ends: close() and an abort return whatever the device is doing, and nothing is lost."""

from __future__ import annotations

import nccl_end_cases as cases
import pytest
from rank_pool import RankPool

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator, on a machine that may be busy


@pytest.mark.parametrize("how", ["close", "drop"])
def test_the_end_right_after_a_step_waits_for_what_is_under_way(gpus: RankPool, how: str) -> None:
    found = [text for texts in gpus.run(3, cases.at_once, how) for text in texts]
    assert not found, "\n".join(found)


def test_close_returns_although_a_transfer_never_ends(gpus: RankPool) -> None:
    results = gpus.run(3, cases.with_a_transfer_that_hangs)
    for rank, (raised, again) in enumerate(results):
        assert rank == 2 or raised, f"rank {rank} raised nothing although its gradient never came"
        assert again.startswith("PipelineError"), f"rank {rank}: {again}"


def test_ctrl_c_ends_a_close_that_waits_for_the_other_ranks(gpus: RankPool) -> None:
    assert gpus.run(3, cases.interrupted_close) == ["KeyboardInterrupt", "", ""]


@pytest.mark.parametrize("how", ["close", "raise"])
def test_a_rank_that_leaves_in_the_middle_ends_the_others_step_and_their_close(gpus: RankPool, how: str) -> None:
    results = gpus.run(3, cases.while_others_step, how)
    for rank in (0, 2):
        assert results[rank].startswith(("PeerLost", "RemoteStageError")), results[rank]
        assert "rank 1" in results[rank]
    assert results[1] == ("" if how == "close" else "ValueError: on purpose")
