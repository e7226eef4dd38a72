"""schedule.trace(): what the ranks did when, put together on every rank that asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trace_cases as cases
from rank_pool import RankPool
from trace_format import complaints

from pypipe.program import Action, Kind, Program, build, builder_names, lower, verify
from pypipe.program.drawing import read_chrome_trace

Rows = list[list[tuple[str, float, float]]]


def check(rows: Rows, program: Program) -> None:
    """Order and causality: nothing is used before it was made, on the clock that the ranks share."""
    assert [[Action.parse(name) for name, _, _ in row] for row in rows] == [list(row) for row in program.ranks]
    ends: dict[tuple[bool, int, int], float] = {}
    for row in rows:
        for name, _, end in row:
            action = Action.parse(name)
            if action.kind is not Kind.W:
                ends[action.kind is Kind.F, action.stage, action.microbatch] = end
    assert min(start for row in rows for _, start, _ in row) == 0
    for row in rows:
        previous = 0.0
        for name, start, end in row:
            assert previous <= start < end
            previous = end
            action = Action.parse(name)
            if action.kind is Kind.W:
                continue
            forward = action.kind is Kind.F
            source = program.previous_stage(action.stage) if forward else program.next_stage(action.stage)
            if source is not None and program.placement[source] != program.placement[action.stage]:
                assert ends[forward, source, action.microbatch] <= start, name


@pytest.mark.parametrize(
    ("schedule", "name", "size", "n_microbatches"),
    [("Schedule1F1B", "1f1b", 3, 5), ("ScheduleGPipe", "gpipe", 2, 2), ("ScheduleGPipe", "gpipe", 1, 3)],
)
def test_every_rank_sees_what_all_ranks_did(
    schedule: str, name: str, size: int, n_microbatches: int, ranks: RankPool
) -> None:
    found: list[dict[str, Any]] = ranks.run(size, cases.traced, schedule, n_microbatches)
    assert all(each == found[0] for each in found)
    assert found[0]["name"] == name
    training = build(name, size, n_microbatches)
    step, evaluation, other = found[0]["timelines"]
    check(step, training)
    check(evaluation, training.forward_only())
    check(other, training)
    assert step != other
    assert sum(found[0]["parts"]) == pytest.approx(found[0]["ratio"])
    assert found[0]["parts"][2] >= -1e-9


@pytest.mark.parametrize("name", builder_names())
def test_every_schedule_s_trace_shows_the_live_activations_that_the_verifier_counts(name: str, ranks: RankPool) -> None:
    options = {"effort": 0.01} if name == "auto" else {}
    program = build(name, 2, 4, **options)
    first, second = ranks.run(2, cases.several_stages, program)
    assert first == second
    rows, peaks = first
    check(rows, program)
    assert tuple(peaks) == verify(lower(program)).peak_activations


def test_a_device_s_clock_is_told_of_each_action_and_its_message(ranks: RankPool) -> None:
    first, second = ranks.run(2, cases.timed_by_a_device)
    assert first == second
    check(first, build("1f1b", 2, 4))


def test_a_trace_is_saved_in_every_form(tmp_path: Path, ranks: RankPool) -> None:
    message, text, rows = ranks.run(2, cases.saved, tmp_path)[0]
    assert message.endswith("step.png has no ending of .json, .html, .svg: give one, it says what is written")
    assert [line.split(":")[0].split(" P=")[0] for line in text.splitlines() if "P=2" in line] == [
        "1f1b, measured,",
        "1f1b, predicted,",
    ]
    assert text.splitlines()[-1].startswith("pypipe plan --ranks 2 --microbatches ")
    assert list(complaints(json.loads((tmp_path / "step.json").read_text()))) == []
    measured, predicted = read_chrome_trace((tmp_path / "step.json").read_text())
    assert (measured.title, predicted.title) == ("1f1b, measured", "1f1b, predicted")
    shown = [[start for _, start, _ in row] for row in json.loads(rows)]
    assert [[event.start for event in row] for row in measured.timeline.ranks] == shown
    assert predicted.timeline.step_time > 0
    assert "<canvas" in (tmp_path / "step.html").read_text()
    assert (tmp_path / "step.svg").read_text().startswith("<svg")


def test_what_cannot_be_is_refused(ranks: RankPool) -> None:
    for found in ranks.run(2, cases.refused):
        assert found["inside"].startswith("PipelineError: this trace is still being taken")
        assert "a trace is being taken already" in found["twice"]
        assert found["again"].startswith("PipelineError: this trace has been taken")
        assert found["empty"].startswith("PipelineError: no step ran to its end")


def test_a_rank_that_takes_no_trace_is_named_in_time(ranks: RankPool) -> None:
    message = ranks.run(2, cases.left_alone)[0]
    assert message.startswith("PipelineTimeout: rank 0 waited for rank 1's part of a trace")


def test_ranks_that_trace_different_steps_are_told(ranks: RankPool) -> None:
    expected = "the ranks have traced different numbers of steps (rank 0: 1, rank 1: 2)"
    assert all(expected in message for message in ranks.run(2, cases.out_of_step))


def test_a_failure_within_a_trace_is_the_step_s_own(ranks: RankPool) -> None:
    (error_0, trace_0), (error_1, trace_1) = ranks.run(2, cases.failed)
    assert (error_0, error_1) == ("RemoteStageError", "ValueError")
    assert all("no step ran to its end" in each for each in (trace_0, trace_1))
