"""`pypipe show`: the pictures that it prints and writes, and how it refuses what it cannot show."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pypipe.commands.cli import main
from pypipe.program import build, dump_csv, lower

pytestmark = pytest.mark.timeout(60)

SHOW = [sys.executable, "-m", "pypipe", "show"]

# As in the documents that the project started from.
GPIPE_4_4 = """\
gpipe, P=4, M=4, F 1, B 1: step 14, bubble 42.9%
t:        0   1   2   3   4   5   6   7   8   9   10  11  12  13
Stage 0:  F0  F1  F2  F3  ·   ·   ·   ·   ·   ·   B3  B2  B1  B0
Stage 1:  ·   F0  F1  F2  F3  ·   ·   ·   ·   B3  B2  B1  B0  ·
Stage 2:  ·   ·   F0  F1  F2  F3  ·   ·   B3  B2  B1  B0  ·   ·
Stage 3:  ·   ·   ·   F0  F1  F2  F3  B3  B2  B1  B0  ·   ·   ·
peak activations by rank: 4 4 4 4
"""


def run(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    return subprocess.run(
        [*SHOW, *arguments],
        cwd=cwd,
        env=environment | {"PYTHONIOENCODING": "utf-8"} | variables,
        capture_output=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
    )


def test_the_well_known_picture_and_the_files_of_all_views(tmp_path: Path) -> None:
    files = ("--svg", "a.svg", "--html", "a.html", "--trace", "a.json")
    result = run("gpipe", "-p", "4", "-m", "4", "--tw", "0", *files, cwd=tmp_path)
    wrote = "wrote a.svg\nwrote a.html\nwrote a.json\n"
    assert (result.returncode, result.stdout, result.stderr) == (0, GPIPE_4_4, wrote)
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert "<canvas" in (tmp_path / "a.html").read_text()
    assert len(json.loads((tmp_path / "a.json").read_text())["traceEvents"]) > 32
    again = run("a.json", "--svg", "b.svg", cwd=tmp_path)
    assert (again.returncode, again.stdout, again.stderr) == (0, GPIPE_4_4, "wrote b.svg\n")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_program_made_to_measure_is_made_for_the_times_that_are_shown(tmp_path: Path) -> None:
    result = run("auto", "-p", "4", "-m", "6", "--tf", "3", "--tb", "4", "--tw", "2", "--tc", "0.5", cwd=tmp_path)
    # No order is shorter: 3 hops down, 6 F and I on the last rank, 3 hops up, and a W.
    step = 3 * 3.5 + 6 * 7 + 3 * 4.5 + 2
    assert result.stdout.startswith(f"auto, P=4, M=6, F 3, I 4, W 2: step {step:g}, bubble 20.6%"), result.stderr


def test_a_program_in_csv_is_drawn_with_or_without_transfers(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0F1,,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    bare = run("mine.csv", "--tb", "2", "--tw", "0", cwd=tmp_path)
    assert bare.stdout.startswith("mine, P=2, M=2, F 1, B 2: step 9, bubble 33.3%\n"), bare.stderr
    dump_csv(lower(build("gpipe", 2, 2)), tmp_path / "mine.csv")
    assert run("mine.csv", "--tb", "2", "--tw", "0", cwd=tmp_path).stdout == bare.stdout


def test_several_are_drawn_below_each_other_on_one_scale(tmp_path: Path) -> None:
    result = run("gpipe", "zb_h1", "-p", "2", "-m", "2", "--trace", "both.json", cwd=tmp_path)
    titles = [line.split(",")[0] for line in result.stdout.splitlines() if "P=2" in line]
    assert titles == ["gpipe", "zb_h1"], result.stderr
    assert run("both.json", cwd=tmp_path).stdout == result.stdout


def test_a_program_that_would_deadlock_is_shown_with_its_lists(tmp_path: Path) -> None:
    (tmp_path / "stuck.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    result = run("stuck.csv", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: stuck: ")
    assert "rank 1: " in result.stderr


def test_times_may_differ_by_stage_and_kind(tmp_path: Path) -> None:
    result = run("1f1b", "-p", "2", "-m", "1", "--tf", "1,2", "--tb", "3", "--tw", "4", "--tc", "0.5", cwd=tmp_path)
    assert "F 1.5, B 7: step 18," in result.stdout  # 1 + 2 + 2 * 7 and two hops


def test_times_are_those_of_a_rank_whatever_its_stages(tmp_path: Path) -> None:
    """The same numbers mean the same work for every schedule, and the same as for `pypipe plan`."""
    arguments = ("1f1b", "ZB-V", "Schedule1F1B", "-p", "2", "-m", "4", "--tf", "1,2", "--tb", "3", "--json")
    result = run(*arguments, cwd=tmp_path)
    shown = json.loads(result.stdout)
    assert [panel["name"] for panel in shown] == ["1f1b", "zbv", "1f1b"], result.stderr
    work = [sum(end - start for events in panel["ranks"] for _, start, end in events) for panel in shown]
    assert work == [4 * (1 + 2 + 2 * 3 + 2 * 1)] * 3
    command = [sys.executable, "-m", "pypipe", "plan", "-p", "2", "-m", "4", "--tf", "1,2", "--tb", "3", "--json"]
    planning = subprocess.run([*command, "--no-search"], cwd=tmp_path, capture_output=True, text=True, check=True)
    plan = json.loads(planning.stdout)
    planned = {row["name"]: row for row in plan["schedules"]}
    for panel in shown:
        assert panel["step_time"] == planned[panel["name"]]["step_time"]
        assert panel["peak_activations"] == planned[panel["name"]]["peak_activations"]
    per_stage = json.loads(run("zbv", "-p", "2", "-m", "4", "--tf", "1,2,3,4", "--json", cwd=tmp_path).stdout)[0]
    lengths = {action[:2]: end - start for events in per_stage["ranks"] for action, start, end in events}
    assert [lengths[f"{stage}F"] for stage in range(4)] == [1, 2, 3, 4]


def terminal_output(cwd: Path, columns: int, **variables: str) -> str:
    """What a terminal of so many columns gets to see."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [*SHOW, "1f1b", "-p", "2", "-m", "4"],
        cwd=cwd,
        env=environment | {"TERM": "xterm-256color", "COLUMNS": str(columns)} | variables,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux ends a terminal so
            break
        seen += piece
    os.close(ours)
    assert process.wait() == 0, seen.decode()
    return seen.decode()


def test_a_terminal_gets_colours_unless_it_refuses_them(tmp_path: Path) -> None:
    assert "\x1b[38;5;" in terminal_output(tmp_path, 80)
    for refusal in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        shown = terminal_output(tmp_path, 44, **refusal)
        assert "\x1b" not in shown
        assert "Stage 0:  " in shown
        assert max(map(len, shown.splitlines())) <= 44


def test_an_output_without_dots_gets_plain_ones(tmp_path: Path) -> None:
    result = run("gpipe", "-p", "2", "-m", "2", "--tw", "0", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert "Stage 0:  F0  F1  .   .   B1  B0\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope", "-p", "4", "-m", "4"], "nope is not a file, and not a schedule: give a file, or one of"),
        (["gpipe"], "give -p and -m"),
        (["gpipe", "-p", "4", "-m", "0"], "a step needs 1 microbatch or more, not 0"),
        (["gpipe", "-p", "0", "-m", "4"], "a pipeline needs 1 rank or more, not 0"),
        (["gpipe", "-p", "4", "-m", "4", "-v", "3"], "-v 3 does not fit: gpipe puts 1 stage on each rank"),
        (["zbv", "-p", "4", "-m", "4", "-v", "3"], "-v 3 does not fit: zbv puts 2 stages on each rank"),
        (["interleaved", "-p", "4", "-m", "4", "-v", "0"], "a rank holds 1 stage or more, not 0"),
        (["gpipe", "-p", "4", "-m", "4", "--tf", "-1"], "--tf is -1: give a time from 0 on"),
        (["gpipe", "-p", "4", "-m", "4", "--tb", "nan"], "--tb is nan: give a time from 0 on"),
        (["gpipe", "-p", "4", "-m", "4", "--tw", "x"], "--tw: 'x' is not a number"),
        (["gpipe", "-p", "4", "-m", "4", "--tc", "1,2"], "--tc has 2 times for 4 stages"),
        (["1f2b", "-p", "4", "-m", "4"], "1f2b is not a file, and not a schedule; did you mean '1f1b'?"),
        (
            ["zbv", "-p", "2", "-m", "4", "--tf", "1,2,3"],
            "--tf has 3 times: give one number, or one for each of 2 ranks",
        ),
        (
            ["gpipe", "-p", "4", "-m", "4", "--svg", "a.png"],
            "--svg does not write .png files: give it a name that ends",
        ),
        (["gpipe", "-p", "4", "-m", "4", "--svg", "no/file"], "cannot write no/file (No such file or directory)"),
        (["gpipe", "-p", "4", "-m", "4", "--html", "."], "cannot write . (Is a directory): give --html"),
        (["bad.json"], "bad.json: it is not valid JSON: line 1, column 1"),
        (["bad.json", "-p", "4"], "-p is for schedules with a name"),
        (["bad.json", "--tf", "1"], "a trace has its own times"),
        (["wrong.csv"], "wrong.csv, row 2, column 2: '1G0' is not an action"),
        (["binary.csv"], "binary.csv is not UTF-8 at byte 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_answered_by_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad.json").write_text("not JSON")
    (tmp_path / "wrong.csv").write_text("0F0,0B0\n1F0,1G0\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["show", *arguments])
    assert ended.value.code == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.count("\n") == 1
    assert message in error


def test_replicas_reduce_in_the_bubble_that_their_stage_has(tmp_path: Path) -> None:
    shown = run("1f1b", "-p", "2", "-m", "2", "--tw", "0", "--tr", "1", "--tu", "1", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[:4] == [
        "1f1b, P=2, M=2, F 1, B 1, U 1, S 0, R 1: step 8, bubble 25.0%",
        "t:        0   1   2   3   4   5   6   7",
        "Stage 0:  U   F0  F1  ·   B0  ·   B1  R",
        "Stage 1:  U   ·   F0  B0  F1  B1  R   ·",
    ]
