"""Stages wrapped for data parallelism: the gradients of one model on all batches, by one reduction a step."""

from __future__ import annotations

import data_parallel_edges as edges
import pytest
import transparency
from data_parallel_cases import Case, train_many
from rank_pool import RankPool

SCHEDULES = [
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleLoopedBFS v=2",
    "ScheduleInterleaved1F1B v=2",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleInterleavedZeroBubble v=2",
    *transparency.V_SHAPED,
]
OTHERS = [
    "bucket_view",
    "fsdp_nested",
    "static",
    "find_unused",
    "fsdp_inside",
    "hook",
    "replicate",
    "fsdp_checkpoint",
    "static_unused",
    "ddp_inside",
    "fsdp_replicate",
    "ddp_checkpoint",
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicated_stages_have_the_gradients_of_one_model(ranks: RankPool, schedule: str) -> None:
    # Every schedule with DDP and fully_shard, and with three of the other ways, in turn. Three microbatches of 2, 2 and
    # 1 rows; or four of one row, so that gradients are what has been received.
    turn = SCHEDULES.index(schedule)
    others = [OTHERS[(3 * turn + i) % len(OTHERS)] for i in range(3)]
    cases = [
        Case(schedule, wrapper, *((3, 5), (4, 4))[(turn + i) % 2]) for i, wrapper in enumerate(["ddp", "fsdp", *others])
    ]
    found = [text for texts in ranks.run(4, train_many, cases) for text in texts]
    assert not found, "\n".join(found)


def test_each_way_is_tried_with_whole_backwards_and_with_split_ones() -> None:
    for i, wrapper in enumerate(OTHERS):
        turns = [turn for turn in range(len(SCHEDULES)) if (i - 3 * turn) % len(OTHERS) < 3]
        split = {turn >= SCHEDULES.index("ScheduleZBH1") for turn in turns}
        assert split == {True, False}, wrapper


def test_hybrid_sharding(ranks: RankPool) -> None:
    cases = [Case("ScheduleZBH1", "hsdp", 3, 5, 1), Case("ScheduleInterleaved1F1B v=2", "hsdp", 3, 5, 1)]
    found = [text for texts in ranks.run(4, train_many, cases) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleZBH1", "ScheduleZBVZeroBubble"])
def test_sharded_stages_accumulate_in_the_reduction_s_dtype(ranks: RankPool, schedule: str) -> None:
    found = [text for texts in ranks.run(4, edges.mixed_precision, schedule) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("wrapper", ["ddp", "static", "replicate", "fsdp", "fsdp_nested"])
def test_a_step_that_fails_leaves_nothing_behind_but_what_it_says(ranks: RankPool, wrapper: str) -> None:
    found = [text for texts in ranks.run(4, edges.after_a_failure, wrapper) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("schedule", "wrapper", "where"),
    [
        ("Schedule1F1B", "ddp", "backward"),
        ("Schedule1F1B", "ddp", "input"),
        ("ScheduleZBH1", "buffers", "first forward"),
        ("Schedule1F1B", "buffers", "second step"),
        ("ScheduleGPipe", "bucket_view", "forward"),
        ("ScheduleZBVZeroBubble", "ddp", "backward"),
        ("ScheduleInterleaved1F1B v=2", "find_unused", "forward"),
        ("ScheduleZBH1", "replicate", "backward"),
        ("Schedule1F1B", "fsdp", "first forward"),
        ("ScheduleZBVZeroBubble", "fsdp", "backward"),
        ("ScheduleZBH1", "fsdp_nested", "input"),
        ("Schedule1F1B", "fsdp_replicate", "forward"),
        ("Schedule1F1B", "fsdp", "eval"),
    ],
)
def test_a_failure_in_one_replica_is_an_error_in_all_and_leaves_them_in_step(
    ranks: RankPool, schedule: str, wrapper: str, where: str
) -> None:
    found = [text for texts in ranks.run(4, edges.one_replica_fails, schedule, wrapper, where) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("unused", "no loss of this step depends on left_out, and DistributedDataParallel was not told"),
        ("mixed precision", "DistributedDataParallel with mixed_precision= in a stage"),
        ("wrapped late", "has changed since the first step or eval: wrap stages before it"),
        ("shared", "one DistributedDataParallel or fully_shard is in two stages of this rank"),
        ("dualpipe", "fully_shard in a stage of a schedule that adds up the gradients of two copies"),
        ("unfrozen", "1 parameters require a gradient, but 2 did when DistributedDataParallel was built"),
        ("static graph changes", "had no gradient in the first step has one now"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(ranks: RankPool, what: str, message: str) -> None:
    for text in ranks.run(4, edges.refused, what):
        assert message in text


AMONG_STAGES = {
    "ddp": "DistributedDataParallel would average the gradients of different stages",
    "ddp over the pipeline": "DistributedDataParallel(module, process_group=...)",
    "replicate": "replicate would average the gradients of different stages",
    "replicate on a mesh": "replicate(module, process_group=...)",
    "fsdp": "fully_shard would share out the parameters of different stages",
    "fsdp inside": "fully_shard(module, mesh=...)",
    "hsdp": "fully_shard(module, mesh=...)",
    "tensor parallel": "parallelize_module would spread a parameter over the ranks of different stages (weight)",
}


@pytest.mark.parametrize("schedule", [*SCHEDULES, *transparency.BIDIRECTIONAL])
def test_a_group_with_other_stages_is_refused_by_name(ranks: RankPool, schedule: str) -> None:
    wrappers = (
        list(AMONG_STAGES)[SCHEDULES.index(schedule) % 2 :: 2] if schedule in SCHEDULES else list(AMONG_STAGES)[:4]
    )
    for wrapper in wrappers:
        for rank, text in enumerate(ranks.run(4, edges.among_stages, schedule, wrapper)):
            assert AMONG_STAGES[wrapper] in text
            assert f"global rank {rank ^ 1})" in text or f"rank {rank ^ 1}, " in text, text


def test_a_group_of_a_pipeline_of_one_rank_or_of_this_rank_alone_is_none_of_them(ranks: RankPool) -> None:
    found = [text for texts in ranks.run(4, edges.alone) for text in texts]
    assert not found, "\n".join(found)


def test_a_static_graph_that_a_schedule_has_made_is_refused_outside(ranks: RankPool) -> None:
    found = [text for texts in ranks.run(4, edges.static_graph_outside) for text in texts]
    assert not found, "\n".join(found)


def test_a_trace_shows_what_replicas_do_together(ranks: RankPool) -> None:
    lines = ["0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0RESHARD", "1UNSHARD,1F0,1B0,1F1,1B1,1REDUCE_GRAD,1RESHARD"]
    assert ranks.run(4, edges.traced) == [lines] * 4


@pytest.mark.parametrize(
    "wrapper", ["ddp", *(wrapper for wrapper in OTHERS if not wrapper.startswith(("fsdp", "ddp_inside")))]
)
def test_two_copies_of_a_model_in_two_replicas(ranks: RankPool, wrapper: str) -> None:
    found = [text for texts in ranks.run(4, edges.two_copies, wrapper) for text in texts]
    assert not found, "\n".join(found)
