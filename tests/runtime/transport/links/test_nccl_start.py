"""How a pipeline over NCCL starts: beside other transports, with old libraries, and what every rank refuses alike."""

from __future__ import annotations

import nccl_start_cases as cases
import pytest
from rank_pool import RankPool

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator, on a machine that may be busy


@pytest.mark.parametrize("ways", [("nccl", "c10d", "shm"), ("shm", "nccl", "c10d"), ("c10d", "nccl", "nccl")])
def test_links_of_one_pipeline_may_go_over_nccl_shared_memory_and_c10d(gpus: RankPool, ways: tuple[str, ...]) -> None:
    tried = [
        ("ScheduleGPipe", "mixed", 5, 11, True),
        ("Schedule1F1B", "gpt", 6, 12, True),
        ("Schedule1F1B", "identities", 3, 3, True),
        ("ScheduleInterleaved1F1B v=2", "mlp", 4, 9, True),
        ("ScheduleZBVZeroBubble", "mixed", 5, 10, True),
        ("ScheduleDualPipe", "mlp", 8, 17, True),
    ]
    found = [text for texts in gpus.run(4, cases.mixed, ways, list(enumerate(tried))) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("ways", [("nccl",), ("shm", "nccl", "c10d")])
def test_checksums_are_refused_on_every_rank_where_any_link_is_nccls(gpus: RankPool, ways: tuple[str, ...]) -> None:
    for rank, raised in enumerate(gpus.run(4, cases.checksum, ways)):
        assert raised.startswith("ConfigurationError: "), f"rank {rank}: {raised}"
        assert 'check="checksum"' in raised
        assert "NCCL" in raised


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["none", "none"], "PYPIPE_NCCL_MAX_CTAS='none': it takes a whole number, 1 to 64"),
        (["65", "65"], "PYPIPE_NCCL_MAX_CTAS='65'"),
        (["2", "4"], "the ranks disagree about max_ctas (rank 0: 2, rank 1: 4)"),
        (["1", "1"], ""),
    ],
)
def test_the_thread_blocks_of_a_communicator_are_a_number_on_which_ranks_agree(
    gpus: RankPool, values: list[str], words: str
) -> None:
    for raised in gpus.run(2, cases.thread_blocks, values):
        assert words in raised
        assert bool(raised) == bool(words)


def test_ranks_that_disagree_about_communicators_say_so_on_every_rank(gpus: RankPool) -> None:
    for rank, raised in enumerate(gpus.run(3, cases.disagreeing)):
        assert raised.startswith("ConfigurationError: the ranks disagree about communicators"), f"rank {rank}: {raised}"
        assert "the same PYPIPE_NCCL_COMMUNICATORS" in raised


@pytest.mark.parametrize(
    ("multiprocessors", "expected"), [(0, "one for each link"), (132, "one for each link"), (16, "one for each pair")]
)
def test_communicators_leave_half_of_a_gpu_to_compute(gpus: RankPool, multiprocessors: int, expected: str) -> None:
    for rank, (communicators, said) in enumerate(gpus.run(3, cases.small_device, multiprocessors)):
        assert communicators == expected, f"rank {rank}"
        assert len(said) == (expected == "one for each pair")
        assert all("rank 1 has 4 links" in words and "16 multiprocessors" in words for words in said), said


@pytest.mark.parametrize(("connections", "count"), [("1", 1), ("8", 0)])
def test_one_queue_for_all_streams_is_a_warning_on_every_rank(gpus: RankPool, connections: str, count: int) -> None:
    for seen in gpus.run(2, cases.warned, connections):
        assert len(seen) == count, seen
        assert all(text.startswith("RuntimeWarning: CUDA_DEVICE_MAX_CONNECTIONS=1: ") for text in seen)
        assert all("unset it" in text for text in seen)
