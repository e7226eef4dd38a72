"""docs/compositions.md says what may stand around and inside a stage; the case behind each of its rows runs here."""

from __future__ import annotations

import re

import pytest
from compositions import COMPOSITIONS, run_all
from rank_pool import RankPool
from search_path import ROOT

PAGE = ROOT / "docs" / "compositions.md"
ROWS = re.findall(r"^\| (?!composition|---)(.+?) \| (.+?) \| .*\|$", PAGE.read_text(), re.MULTILINE)

_DATA_PARALLEL = "runtime/data_parallel/test_data_parallel.py"
_TENSOR_PARALLEL = "runtime/transport/test_tensor_parallel.py"
_REPLICAS = "test_replicated_stages_have_the_gradients_of_one_model"
_TENSORS = "test_tensor_parallel_stages_have_the_gradients_of_the_whole_model"

_CLIPPING, _SCALING = "runtime/step/test_clipping.py", "runtime/step/test_scaling.py"
_TIES = "runtime/step/test_ties.py"

# Rows whose cases are in tests of their own: the file, the test, and what the case is called there.
ELSEWHERE = {
    "`DistributedDataParallel`": (_DATA_PARALLEL, _REPLICAS, "ddp"),
    "`replicate`": (_DATA_PARALLEL, _REPLICAS, "replicate"),
    "`fully_shard` of a whole stage": (_DATA_PARALLEL, _REPLICAS, "fsdp"),
    "`fully_shard`, nested": (_DATA_PARALLEL, _REPLICAS, "fsdp_nested"),
    "`fully_shard` on a mesh of two dimensions (HSDP)": (_DATA_PARALLEL, "test_hybrid_sharding", "hsdp"),
    "`parallelize_module`": (_TENSOR_PARALLEL, _TENSORS, "plain"),
    "`DTensor`s at a boundary": (_TENSOR_PARALLEL, _TENSORS, "partial"),
    "one weight in several stages (`pypipe.tie`)": (_TIES, "test_replicated_and_sharded_stages", "ddp"),
    "`schedule.clip_grad_norm_()`": (_CLIPPING, "test_replicas_count_once_and_shards_count_as_one_parameter", "fsdp"),
    "`pypipe.GradScaler`": (_SCALING, "test_scales_and_parameters_are_those_of_the_unpipelined_model", "module"),
    "`loss_parallel()` around `step()`": (_TENSOR_PARALLEL, "test_a_loss_of_sharded_classes", "ScheduleZBH1"),
}


def test_each_row_has_a_case_and_each_case_a_row() -> None:
    names = [name for name, _ in ROWS]
    assert sorted(names) == sorted([*COMPOSITIONS, *ELSEWHERE])
    for name, (file, test, case) in ELSEWHERE.items():
        text = (ROOT / "tests" / file).read_text()
        assert f"def {test}(" in text, name
        assert f'"{case}"' in text, name
    for name, verdict in ROWS:
        refused = name in COMPOSITIONS and COMPOSITIONS[name].refused is not None
        assert verdict == ("refused" if refused else "right"), name


@pytest.mark.parametrize(
    "schedule",
    [
        "ScheduleGPipe",
        "Schedule1F1B",
        "ScheduleZBH1",
        "ScheduleInterleaved1F1B v=2",
        "ScheduleZBVZeroBubble",
    ],
)
def test_the_table_is_true(ranks: RankPool, schedule: str) -> None:
    results = ranks.run(2, run_all, schedule)
    tried = {name for name, case in COMPOSITIONS.items() if case.schedules is None or schedule in case.schedules}
    found = []
    for result in results:
        assert result.keys() == tried
        found += [text for texts in result.values() for text in texts]
    assert not found, "\n".join(found)
