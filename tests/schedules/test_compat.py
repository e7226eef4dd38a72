"""pypipe.compat: pypipe under the names of torch.distributed.pipelining."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import compat_cases
import pytest
import swap_runs
import swap_scripts
import torch
from rank_pool import RankPool
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules, stage

import pypipe
from pypipe import compat


@pytest.fixture(autouse=True)
def _fresh_ranks_after_a_failure(ranks: RankPool, request: pytest.FixtureRequest) -> Iterator[None]:
    """torch's ranks wait for one that failed until the end of time."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        ranks.close()


@pytest.mark.parametrize("script", swap_scripts.SCRIPTS)
def test_a_script_computes_what_it_computes_with_torchs_classes(ranks: RankPool, script: str) -> None:
    assert ranks.run(2, compat_cases.run_both, script, "Schedule1F1B", timeout=30.0) == [[], []]


def test_a_file_that_imports_torchs_names(ranks: RankPool) -> None:
    assert ranks.run(2, compat_cases.run_both, "text_with_its_import_swapped", timeout=30.0) == [[], []]


@pytest.mark.parametrize("schedule", swap_runs.MULTI)
def test_several_stages_per_rank(ranks: RankPool, schedule: str) -> None:
    assert ranks.run(2, compat_cases.run_both, "several_stages", schedule, timeout=30.0) == [[], []]


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("name", compat_cases.NAMES)
def test_microbatches_that_are_cut_already(ranks: RankPool, name: str, scale_grads: bool) -> None:
    ranks.run(2, compat_cases.given_microbatches, name, scale_grads, timeout=30.0)


@pytest.mark.parametrize("format", ["compute_only", "compute_comms", "table"])
@pytest.mark.parametrize("name", [*compat_cases.LOOPED, *compat_cases.IN_A_V])
def test_torchs_own_programs_run(ranks: RankPool, tmp_path: Path, name: str, format: str) -> None:
    ranks.run(2, compat_cases.loaded_csv, name, format, str(tmp_path), timeout=30.0)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("length", "kwarg_mbs has 3"),
        ("type", "kwarg_mbs is a generator: give a list"),
        ("both", "take microbatches in the place of a batch"),
        ("no target", "needs target="),
    ],
)
def test_wrong_microbatches_are_an_error_on_every_rank(ranks: RankPool, kind: str, words: str, culprit: int) -> None:
    if kind == "no target" and culprit == 0:
        pytest.skip("the first rank has no target")
    heard = ranks.run(2, compat_cases.bad_microbatches, kind, culprit, timeout=30.0)
    ranks.close()
    assert heard[culprit].startswith("InputError: ")
    for text in heard:
        assert re.search(words, text), heard


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0X0\n1F0\n", "'0X0' is not an action"),
        ("0F0,0SEND_F0\n1RECV_F0,1F0\n", "holds transfers .* format='compute_comms'"),
        ("0F0,0B0\n1F0,1B0\n", "n_microbatches is 4, but the program _load_csv has 1"),
    ],
)
def test_a_wrong_file_is_an_error_on_every_rank(ranks: RankPool, tmp_path: Path, text: str, words: str) -> None:
    heard = ranks.run(2, compat_cases.bad_csv, text, str(tmp_path), timeout=30.0)
    ranks.close()
    for each in heard:
        assert re.search(words, each), heard


def test_names_go_and_come_back() -> None:
    modules = (pipelining, schedules, stage)
    before = [dict(vars(module)) for module in modules]
    for _ in range(2):
        compat.install()
    try:
        assert issubclass(pipelining.PipelineStage, pypipe.PipelineStage)
        assert schedules.Schedule1F1B is pipelining.Schedule1F1B
        assert pipelining.Schedule1F1B.__module__ == "pypipe.compat.schedules"
        for untouched in ("SplitPoint", "pipe_split", "pipeline", "Pipe"):
            assert getattr(pipelining, untouched) is before[0][untouched]
    finally:
        for _ in range(2):
            compat.uninstall()
    assert [dict(vars(module)) for module in modules] == before


def test_every_class_is_what_torchs_is() -> None:
    """What `issubclass` says of torch's classes, it says of those in their place."""
    names = [name for name, value in vars(schedules).items() if isinstance(value, type) and "Schedule" in name]
    theirs = {name: getattr(schedules, name) for name in names}
    with compat.installed():
        mine = {name: getattr(schedules, name) for name in names}
        for name in names:
            assert mine[name] is not theirs[name], f"{name} is still torch's"
            for base in names:
                assert issubclass(mine[name], mine[base]) == issubclass(theirs[name], theirs[base]), (name, base)


@pytest.mark.parametrize("name", [*compat_cases.NAMES, "PipelineScheduleSingle", "PipelineScheduleMulti"])
def test_schedules_by_name_in_any_case(name: str) -> None:
    theirs = {spelling: schedules.get_schedule_class(spelling) for spelling in (name, name.lower(), name.upper())}
    with compat.installed():
        for spelling, cls in theirs.items():
            assert schedules.get_schedule_class(spelling) is getattr(schedules, cls.__name__)


def test_an_unknown_schedule_is_an_error_that_names_the_nearest() -> None:
    with compat.installed(), pytest.raises(ValueError, match=r"Unknown schedule name '1F1BB'.*Did you mean '1F1B'\?"):
        schedules.get_schedule_class("1F1BB")


def test_an_import_that_came_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    client = types.ModuleType("an_early_client")
    client.PipelineStage = pipelining.PipelineStage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_early_client", client)
    before = dict(vars(schedules))
    with pytest.raises(pypipe.ConfigurationError, match=r"too late .*an_early_client \(PipelineStage\)"):
        compat.install()
    assert dict(vars(schedules)) == before


def test_a_class_that_was_derived_first_is_named() -> None:
    class Own(schedules.PipelineScheduleSingle):
        pass

    try:
        with pytest.raises(pypipe.ConfigurationError, match=r"Own \(derived from PipelineScheduleSingle\)"):
            compat.install()
    finally:
        Own.__module__ = "torch.of_this_test"  # classes live on in their base's list until garbage is collected


class TestWhatIsRefused:
    @pytest.fixture(autouse=True)
    def _installed(self) -> Iterator[None]:
        with compat.installed():
            yield

    def test_stages_of_the_tracing_front_end(self) -> None:
        with pytest.raises(pypipe.ConfigurationError, match=r"give PipelineStage\(pipe.get_stage_module\(1\), 1"):
            pipelining.build_stage(torch.nn.Linear(1, 1), 1, None, torch.device("cpu"))  # type: ignore[arg-type]

    def test_stages_of_a_traced_model(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        pipe = pipelining.pipeline(model, (torch.ones(1, 2),), split_spec={"1": pipelining.SplitPoint.BEGINNING})
        assert pipe.num_stages == 2
        with pytest.raises(pypipe.ConfigurationError, match="do not run"):
            pipe.build_stage(0, torch.device("cpu"))

    def test_a_schedule_without_a_program(self) -> None:
        piece = pipelining.PipelineStage(torch.nn.Linear(1, 1), 0, 1, torch.device("cpu"))
        with pytest.raises(pypipe.ConfigurationError, match="PipelineScheduleSingle is a base class"):
            schedules.PipelineScheduleSingle(piece, 1)  # type: ignore[abstract]
        runtime = schedules._PipelineScheduleRuntime([piece], 1)
        with pytest.raises(pypipe.ConfigurationError, match="has no program yet"):
            runtime.step()
        with pytest.raises(pypipe.ConfigurationError, match="pypipe runs every action itself"):
            runtime.register_custom_function(schedules.FORWARD, lambda *_: None)
        with pytest.raises(pypipe.ConfigurationError, match="format='own'"):
            runtime._load_csv("none.csv", format="own")  # type: ignore[arg-type]
        with pytest.raises(AttributeError, match=r"'bwd_recv_ops'.* has no such"):
            _ = runtime.bwd_recv_ops


def test_what_clients_read_of_a_schedule() -> None:
    with compat.installed():
        piece = pipelining.PipelineStage(torch.nn.Linear(2, 2), 0, 1, torch.device("cpu"))
        assert (piece.group_rank, piece.group_size, piece.stage_index_to_group_rank) == (0, 1, {0: 0})
        schedule = pipelining.Schedule1F1B(piece, 2, loss_fn=torch.nn.functional.mse_loss)
        assert (schedule._n_microbatches, schedule._has_backward, schedule._num_stages) == (2, True, 1)
        assert schedule._stage is piece
        assert str(schedule.pipeline_order) == "{0: [0F0, 0B0, 0F1, 0B1]}"
        assert type(schedule.pipeline_order[0][0]) is schedules._Action  # type: ignore[index]
        schedule.step(torch.ones(2, 2), target=torch.ones(2, 2))
        schedule.close()  # type: ignore[attr-defined]
