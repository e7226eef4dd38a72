"""Several pipelines in one job never meet; ranks come from wherever they are; nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pipeline_cases as cases
import pytest
from rank_pool import Raised, RankPool
from search_path import PYTHONPATH

SCRIPT = str(Path(cases.__file__))
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _fresh_ranks_after_a_failure(ranks: RankPool, request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks that came out of step, or hang, must not spoil the next test."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        ranks.close()


def _check(ranks: RankPool, size: int, function: object, *arguments: object) -> None:
    found = [text for texts in ranks.run(size, function, *arguments) for text in texts]  # type: ignore[arg-type]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_data_parallel_replicas_of_a_pipeline_train_as_one_model_would(ranks: RankPool, schedule: str) -> None:
    _check(ranks, 4, cases.replicas, schedule)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_schedules_of_one_process_take_turns(ranks: RankPool, size: int) -> None:
    _check(ranks, size, cases.in_turn)


def test_a_pipeline_may_step_inside_a_forward_of_another_one(ranks: RankPool) -> None:
    _check(ranks, 2, cases.one_inside_another)


def test_a_loss_function_may_run_a_pipeline_of_its_own(ranks: RankPool) -> None:
    _check(ranks, 4, cases.teacher_inside_the_loss)


@pytest.mark.parametrize("size", [1, 2])
def test_two_schedules_on_one_stage_add_up_their_gradients(ranks: RankPool, size: int) -> None:
    _check(ranks, size, cases.one_stage_twice)


def test_two_groups_of_the_same_ranks_carry_two_pipelines(ranks: RankPool) -> None:
    _check(ranks, 4, cases.two_groups_of_the_same_ranks)


def test_pipelines_over_some_and_over_all_ranks_of_a_job_live_side_by_side(ranks: RankPool) -> None:
    _check(ranks, 4, cases.some_and_all_ranks)


@pytest.mark.parametrize("how", ["close", "with", "forget"])
@pytest.mark.parametrize("fail", [False, True], ids=["in good order", "after a failure"])
def test_a_pipeline_leaves_no_descriptors_threads_sockets_or_memory_behind(
    ranks: RankPool, how: str, fail: bool
) -> None:
    _check(ranks, 3, cases.leave_nothing, how, fail)


def test_close_ends_sockets_and_threads_while_the_schedule_object_lives(ranks: RankPool) -> None:
    _check(ranks, 3, cases.sockets_end_with_close)


def test_a_schedule_that_is_collected_without_close_says_goodbye(ranks: RankPool) -> None:
    _check(ranks, 2, cases.collected_without_close)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_data_loader_worker_disturbs_nothing_and_holds_no_control_socket(ranks: RankPool) -> None:
    _check(ranks, 2, cases.forked_data_loader)


def test_the_death_of_a_rank_is_seen_although_a_child_of_it_lives_on(ranks: RankPool, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    results = ranks.run_raw(2, cases.die_with_a_living_child, str(pid_file), timeout=20.0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert isinstance(results[1], Raised)
    assert isinstance(results[0], str), results[0]
    assert results[0].startswith("PeerLost: "), results[0]
    assert "rank 1" in results[0]


@pytest.mark.parametrize("world_size", [None, "1"])
def test_one_stage_trains_without_any_environment_or_process_group(
    monkeypatch: pytest.MonkeyPatch, world_size: str | None
) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    assert cases.train_without_process_group(0, 1) == []


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_is_an_error_that_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    import torch

    import pypipe

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(pypipe.ConfigurationError, match=f"{missing} is not set.*torchrun"):
        pypipe.PipelineStage(torch.nn.Identity(), 0, 2)


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "two"}, {"RANK": "first"}, {"MASTER_PORT": "none"}])
def test_an_environment_that_makes_no_sense_is_an_error_of_pypipe(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    import torch

    import pypipe

    good = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**good, **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pypipe.ConfigurationError, match=next(iter(variables))):
        pypipe.PipelineStage(torch.nn.Identity(), 0, 2)


def _environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, **variables}


def test_ranks_come_from_the_environment_without_a_process_group() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, "--then-group"],
            env=_environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for output, errors in outputs:
        assert output.strip() == "equal", output + errors


def test_ranks_come_from_torchrun_without_a_process_group() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Two ranks write to one pipe: their words may run together.
    assert done.stdout.replace("\n", "") == "equal" * 2, done.stdout + done.stderr
