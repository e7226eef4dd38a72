"""`pypipe plan`: the table, JSON, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pypipe.planning import plan_command, plan_options
from pypipe.program import build, simulate
from pypipe.program.drawing import Panel, chrome_trace

pytestmark = pytest.mark.timeout(60)

SMALL = ["-p", "4", "-m", "8", "--no-search"]
PROFILE = ["-p", "8", "-m", "24", "--tf", "18522", "--tb", "18086", "--tw", "9337", "--tc", "601"]


def plan(*arguments: str, cwd: Path, columns: int | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    if columns is not None:
        environment["COLUMNS"] = str(columns)
    return subprocess.run(
        [sys.executable, "-m", "pypipe", "plan", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_json_has_every_schedule_s_figures_and_nothing_else_is_printed(tmp_path: Path) -> None:
    result = plan(*PROFILE, "--memory", "16", "--json", "--no-search", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    rows = {row["name"]: row for row in data["schedules"]}
    assert {"gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zbv", "dualpipe", "dualpipev"} <= set(rows)
    for row in rows.values():
        assert {
            "name", "step_time", "bubble_ratio", "bubble_ratio_by_span", "peak_activations", "transfers", "verified"
        } <= set(row)  # fmt: skip
        assert row["verified"] is True
        assert len(row["peak_activations"]) == 8
    assert round(rows["1f1b"]["bubble_ratio_by_span"], 4) == 0.2431
    assert rows["1f1b"]["peak_activations"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert rows["1f1b"]["transfers"] == 2 * 7 * 24
    assert not rows["gpipe"]["fits"]
    assert data["best"] == next(row["name"] for row in data["schedules"] if row["best"])


def test_a_schedule_that_doubles_the_parameters_is_the_best_only_where_asked_for(tmp_path: Path) -> None:
    text = plan("-p", "4", "-m", "8", "--no-search", cwd=tmp_path).stdout
    assert "* the shortest step: zbv (with 2x parameters dualpipe, 25.00)" in text
    text = plan("-p", "4", "-m", "8", "--no-search", "--two-copies", cwd=tmp_path).stdout
    assert "* the shortest step: dualpipe (2x parameters; with one copy of them zbv, 25.50)" in text


def test_the_search_keeps_one_copy_of_the_parameters_unless_two_are_allowed(tmp_path: Path) -> None:
    rows = json.loads(plan("-p", "4", "-m", "8", "--json", cwd=tmp_path).stdout)["schedules"]
    assert next(row for row in rows if row["name"] == "auto")["copies"] == 1


def test_notes_and_terms_are_there_at_80_columns(tmp_path: Path) -> None:
    text = plan("-p", "4", "-m", "8", "--no-search", cwd=tmp_path, columns=80).stdout
    assert "2x parameters" in text
    assert "v = 2" in text
    said = " ".join(text.split())
    assert "peak: the most that a rank keeps (A: one microbatch's activations on one rank)" in said
    assert "v: stages on each rank" in said
    assert "by span" not in text or "by span: the same" in said


def test_the_search_adds_a_row_that_nothing_beats(tmp_path: Path) -> None:
    result = plan(
        "-p", "3", "-m", "6", "--tf", "2", "--tb", "3", "--tc", "0.25", "--memory", "3", "--json", cwd=tmp_path
    )
    data = json.loads(result.stdout)
    (auto,) = [row for row in data["schedules"] if row["name"] == "auto"]
    assert auto["fits"]
    assert auto["step_time"] == min(row["step_time"] for row in data["schedules"] if row["fits"])
    assert data["unavailable"][0]["name"] == "dualpipe"


@pytest.mark.parametrize("columns", [200, 120, 80, 60, 50])
def test_no_line_of_the_table_is_wider_than_the_terminal(columns: int, tmp_path: Path) -> None:
    traffic = ["--batch", "8", "--sequence", "2048", "--hidden", "8192", "--bandwidth", "50", "--unit", "ms"]
    result = plan(*SMALL, *traffic, "--memory", "5", cwd=tmp_path, columns=columns)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in result.stdout
    assert "ms" in result.stdout
    assert "\x1b" not in result.stdout
    (best,) = [line for line in lines if line.startswith("* ") and "the shortest" not in line]
    assert best.split()[1] in next(line for line in lines if "the shortest step" in line)
    assert "! gpipe" in result.stdout


def test_the_bytes_over_the_cuts_are_the_well_known_ones(tmp_path: Path) -> None:
    result = plan(*SMALL, "--batch", "8", "--sequence", "2048", "--hidden", "8192", cwd=tmp_path)
    text = " ".join(result.stdout.split())
    assert "A cut carries 268 MB a step in each direction (8 x 2048 x 8192 in bf16)" in text
    assert "3 cuts of one stage a rank, 1.61 GB a step" in text
    assert "M = 8 is less than 4P = 16" in text


def test_schedules_that_cannot_be_built_are_listed_with_the_reason(tmp_path: Path) -> None:
    result = plan("-p", "3", "-m", "4", "--no-search", cwd=tmp_path)
    assert "- dualpipe cannot be built: dualpipe needs an even number of ranks" in " ".join(result.stdout.split())


def test_a_measured_trace_gives_the_times(tmp_path: Path) -> None:
    """Of a schedule of two stages a rank, whose stages are not alike: plan computes with what the trace shows."""
    program = build("zbv", 2, 6)
    weights = [0.5, 1.0, 1.5, 2.0]
    measured = simulate(program, forward=[1.0, 2.0, 3.0, 4.0], input_backward=[2.0] * 4, weight_backward=weights)
    (tmp_path / "step.json").write_text(chrome_trace(Panel(measured, "zbv, measured", True)))
    given = {"--ranks": "2", "--microbatches": "6", "--tf": "3,7", "--tb": "4,4", "--tw": "1.5,3.5", "--unit": "us"}
    assert plan_options(measured) == given
    from_trace = plan("--from", "step.json", "--json", "--no-search", cwd=tmp_path)
    by_hand = plan(*(text for pair in given.items() for text in pair), "--json", "--no-search", cwd=tmp_path)
    assert from_trace.returncode == 0, from_trace.stderr
    assert json.loads(from_trace.stdout) == json.loads(by_hand.stdout)
    assert plan_command(measured).split()[:4] == ["pypipe", "plan", "--ranks", "2"]
    more = json.loads(plan("--from", "step.json", "-m", "12", "--json", "--no-search", cwd=tmp_path).stdout)
    assert max(row["transfers"] for row in more["schedules"]) > max(
        row["transfers"] for row in json.loads(from_trace.stdout)["schedules"]
    )


def test_a_whole_backward_is_halved(tmp_path: Path) -> None:
    options = plan_options(simulate(build("1f1b", 2, 2), forward=1.0, backward=3.0))
    assert (options["--tb"], options["--tw"]) == ("1.5,1.5", "1.5,1.5")
    assert plan_options(simulate(build("dualpipe", 2, 4), forward=1.0))["--tf"] == "1,1"


def test_planning_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pypipe.commands.cli import main;"
        "main(['plan', '-p', '2', '-m', '2', '--json'], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["-m", "4"], "-p is missing: give the number of ranks, or a trace with --from"),
        (["--from", "none.json"], "--from none.json: No such file or directory: give a saved trace"),
        (["--from", "simulated.json"], "its times were simulated: give a trace that schedule.trace() has measured"),
        (["-p", "4", "-m", "0"], "-m is 0: give the number of microbatches"),
        (["-p", "4", "-m", "8", "--tf", "-1"], "--tf is -1: give a time from 0 on"),
        (["-p", "4", "-m", "8", "--tb", "nan"], "--tb is nan: give a time from 0 on"),
        (["-p", "4", "-m", "8", "--tw", "fast"], "--tw: 'fast' is not a number"),
        (["-p", "4", "-m", "8", "--tc", "1,2"], "--tc has 2 times: give one number"),
        (["-p", "4", "-m", "8", "-v", "0"], "-v is 0: give the number of stages on each rank"),
        (["-p", "4", "-m", "8", "--batch", "8"], "--sequence and --hidden: missing"),
        (["-p", "4", "-m", "8", "--bandwidth", "8"], "--bandwidth says nothing alone"),
    ],
)
def test_bad_input_is_answered_by_one_line_with_the_remedy(arguments: list[str], remedy: str, tmp_path: Path) -> None:
    (tmp_path / "simulated.json").write_text(chrome_trace(build("1f1b", 2, 2)))
    result = plan(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert remedy in result.stderr
