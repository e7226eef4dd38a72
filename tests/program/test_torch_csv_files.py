"""Programs of torch.distributed.pipelining itself: its schedules are verified here, and ours are loaded there."""

import csv
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining import schedules

from pypipe.program import (
    Kind,
    Program,
    ProgramError,
    build,
    builder_names,
    dump_csv,
    load_csv,
    lower,
    simulate,
    verify,
)

CASES = [
    # torch's class, our schedule of that name, ranks, stages on each, microbatches, and whether the lists are equal
    ("ScheduleGPipe", "gpipe", 3, 1, 4, False),  # torch's backwards go in order of microbatches
    ("Schedule1F1B", "1f1b", 4, 1, 6, True),
    ("ScheduleInterleaved1F1B", "interleaved", 3, 2, 6, True),
    ("ScheduleInterleaved1F1B", "interleaved", 4, 2, 10, True),
    ("ScheduleInterleaved1F1B", "interleaved", 4, 3, 3, True),
    ("ScheduleLoopedBFS", "looped_bfs", 3, 2, 5, True),
    ("ScheduleInterleavedZeroBubble", "interleaved_zb", 4, 2, 8, True),
    ("ScheduleZBVZeroBubble", "zbv", 4, 2, 10, True),
    ("ScheduleZBVZeroBubble", "zbv", 3, 2, 2, True),
    ("ScheduleDualPipeV", "dualpipev", 4, 2, 10, True),
    ("ScheduleDualPipeV", "dualpipev", 3, 2, 6, True),
]


def stages(n_ranks: int, stages_per_rank: int, rank: int = 0) -> list[Any]:
    """What torch's constructors ask of a rank's stages, without a process group."""
    n_stages = n_ranks * stages_per_rank
    return [
        SimpleNamespace(
            stage_index=index,
            num_stages=n_stages,
            group_size=n_ranks,
            group_rank=rank,
            group=None,
            is_first=index == 0,
            is_last=index == n_stages - 1,
            has_backward=True,
            submod=nn.Identity(),
            device="cpu",
            stage_index_to_group_rank={stage: stage % n_ranks for stage in range(n_stages)},
        )
        for index in range(rank, n_stages, n_ranks)
    ]


def torch_schedule(name: str, n_ranks: int, stages_per_rank: int, n_microbatches: int) -> Any:
    if not hasattr(schedules, name):
        pytest.skip(f"this torch has no {name}")
    given = stages(n_ranks, stages_per_rank)
    return getattr(schedules, name)(given[0] if stages_per_rank == 1 else given, n_microbatches)


def dump_by_torch(schedule: Any, path: Path, form: str) -> bool:
    """Whether this torch can write the schedule in that form; if so, it is written."""
    has_forms = "format" in inspect.signature(schedule._dump_csv).parameters
    if has_forms:
        schedule._dump_csv(path, format=form)
    elif form == "compute_only":
        schedule._dump_csv(path)
    return has_forms or form == "compute_only"


def flattened(program: Program) -> tuple[Any, ...]:
    return program.placement, program.ranks


@pytest.mark.parametrize(("name", "ours", "n_ranks", "v", "n_microbatches", "is_equal"), CASES)
def test_what_torch_writes_is_loaded_and_verified(
    name: str, ours: str, n_ranks: int, v: int, n_microbatches: int, is_equal: bool, tmp_path: Path
) -> None:
    schedule = torch_schedule(name, n_ranks, v, n_microbatches)
    path = tmp_path / "compute.csv"
    if isinstance(schedule, schedules.PipelineScheduleMulti):
        dump_by_torch(schedule, path, "compute_only")
    elif not hasattr(schedule, "_get_pipeline_order"):
        pytest.skip("this torch does not show the order of its single-stage schedules")
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(schedule._get_pipeline_order().values())
    program = load_csv(path)
    assert (program.name, program.n_ranks, program.n_stages) == ("compute", n_ranks, n_ranks * v)
    if name == "Schedule1F1B" and program.n_microbatches == n_microbatches + 1:
        # torch (2.13) numbers the last rank's forwards from 1 in the order that it shows; it does not run it.
        with pytest.raises(ProgramError, match="0F6: missing: rank 0 has stage 0"):
            lower(program)
        return
    assert program.n_microbatches == n_microbatches
    verify(lower(program))
    simulate(program)
    options = {"stages_per_rank": v} if ours in ("interleaved", "looped_bfs", "interleaved_zb") else {}
    expected = build(ours, n_ranks, n_microbatches, **options)
    assert (flattened(program) == flattened(expected)) == is_equal
    if isinstance(schedule, schedules.PipelineScheduleMulti) and dump_by_torch(schedule, path, "compute_comms"):
        lowered = load_csv(path)
        assert lowered.compute_only().ranks == program.ranks
        assert any(action.kind is Kind.RECV_B for action in lowered.ranks[0])
        # torch posts each receive as soon as it is sent: with a slot for each such message nothing deadlocks.
        verify(lowered)


@pytest.mark.parametrize("name", [name for name in builder_names() if name != "dualpipe"])
@pytest.mark.parametrize("n_microbatches", [3, 8])
def test_what_we_write_is_loaded_by_torch(name: str, n_microbatches: int, tmp_path: Path) -> None:
    program = build(name, 4, n_microbatches)
    path = tmp_path / "program.csv"
    given = stages(4, program.n_stages // 4)
    for stage in given:
        stage.stage_index_to_group_rank = dict(enumerate(program.placement))  # read by older releases only
    runtime = schedules._PipelineScheduleRuntime(given, n_microbatches)
    dump_csv(program, path)
    assert load_csv(path, name=program.name) == program
    runtime._load_csv(str(path), format="compute_only")
    for synchronous in (False, True):
        lowered = lower(program, synchronous=synchronous)
        dump_csv(lowered, path)
        assert load_csv(path, name=program.name) == lowered
        runtime._load_csv(str(path), format="compute_comms")
        assert {rank: list(map(str, actions)) for rank, actions in runtime.pipeline_order_with_comms.items()} == {
            rank: list(map(str, actions)) for rank, actions in enumerate(lowered.ranks)
        }
    # torch's simulation lets a receive wait where it stands, as its shared communicators do.
    runtime._simulate()
