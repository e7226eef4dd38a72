"""The record of a rank: what it did last, whoever reads it and however the rank ended; and how it is told."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pypipe import _core
from pypipe.commands.cli import main
from pypipe.program import Action, build, lower
from pypipe.runtime.diagnostics import status_table
from pypipe.runtime.diagnostics.flight_record import FlightError, find, timeline
from pypipe.runtime.diagnostics.recorder import SUFFIX, Recorder, code_of, read
from pypipe.runtime.diagnostics.status_table import Known

A = Action.parse


def _write(recorder: Recorder, *actions: str) -> None:
    for action in actions:
        recorder.core.begin(code_of(A(action)))


def test_a_ring_keeps_the_latest_actions_and_the_one_in_progress() -> None:
    recorder = Recorder(2, capacity=4)
    recorder.core.step()
    _write(recorder, *(f"1F{m}" for m in range(6)), "1SEND_B300")
    recorder.core.ready()
    kept = recorder.actions()
    # The oldest place is the one that would be overwritten next, so it does not count.
    assert [str(one.action) for one in kept] == ["1F4", "1F5", "1SEND_B300"]
    assert all(a.end == b.start for a, b in itertools.pairwise(kept))
    assert (kept[-1].end, kept[-1].step) == (0, 1)
    assert kept[-1].start <= kept[-1].ready
    recorder.core.end()
    assert recorder.actions()[-1].end > 0


def test_an_action_that_begins_again_is_one_action() -> None:
    recorder = Recorder(0)
    _write(recorder, "0F0", "0F0", "0F1")
    assert [str(one.action) for one in recorder.actions()] == ["0F0", "0F1"]


def test_a_trace_keeps_more_than_the_ring() -> None:
    recorder = Recorder(0, capacity=4)
    _write(recorder, "0F0")
    recorder.start_trace(100)
    _write(recorder, *(f"0F{m}" for m in range(1, 50)))
    recorder.core.end()
    traced = recorder.stop_trace()
    assert [one.action.microbatch for one in traced] == list(range(50))
    assert all(one.start <= one.end for one in traced)
    assert recorder.stop_trace() == []


def test_a_file_says_what_the_recorder_says(tmp_path: Path) -> None:
    path = tmp_path / f"a-rank-3{SUFFIX}"
    recorder = Recorder(3, path=str(path))
    _write(recorder, "0F0", "7000B5", "0SEND_F0")
    recorder.core.set_busy("writing a checkpoint")
    cause = _core.Cause(_core.CauseKind.ERROR, 1, message="why")
    recorder.core.set_cause(cause)
    found = read(path)
    assert (found.rank, found.busy, found.cause) == (3, "writing a checkpoint", cause)
    assert list(found.actions) == recorder.actions()
    recorder.core.discard()
    assert not path.exists()


@pytest.mark.parametrize("before", range(4))
def test_what_a_rank_is_busy_with_is_cut_between_characters(before: int) -> None:
    recorder = Recorder(0)
    text = "x" * before + "\N{GRINNING FACE}" * 60
    recorder.core.set_busy(text)
    said = recorder.core.status().busy
    assert said
    assert text.startswith(said)


@pytest.mark.parametrize("data", [b"", bytes(100), bytes(5000), b"\xff" * 5000])
def test_what_is_no_record_is_an_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / f"x-rank-0{SUFFIX}").write_bytes(data)
    with pytest.raises(FlightError, match="is not a record"):
        find(tmp_path)


_VICTIM = """
import os, sys
from pypipe.program import Action
from pypipe.runtime.diagnostics.recorder import Recorder, code_of
recorder = Recorder(1, path=sys.argv[1])
for action in ("1F0", "1SEND_F0", "1F1"):
    recorder.core.begin(code_of(Action.parse(action)))
os.kill(os.getpid(), 9)
"""


def test_a_killed_rank_leaves_its_record_and_the_command_shows_the_moment(tmp_path: Path) -> None:
    survivor = Recorder(0, path=str(tmp_path / f"a-rank-0{SUFFIX}"))
    _write(survivor, "0F0", "0SEND_F0", "0B0")
    subprocess.run([sys.executable, "-c", _VICTIM, str(tmp_path / f"a-rank-1{SUFFIX}")], cwd=tmp_path, check=False)
    survivor.core.set_cause(_core.Cause(_core.CauseKind.LOST, 1, seen_by=0, message="its connection closed"))
    done = CliRunner().invoke(main, ["show", "--record", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("Rank 1 was killed")
    (marked,) = [line for line in done.output.splitlines() if "<== the cause" in line]
    assert "1F1 in progress" in marked
    assert "0B0 in progress ..." in done.output


def test_an_empty_folder_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["show", "--record", str(tmp_path)])
    assert done.exit_code == 2
    assert "PYPIPE_RECORD_DIR" in done.output


def test_the_latest_pipeline_of_a_folder_is_shown(tmp_path: Path) -> None:
    for number, pipeline in enumerate(("a", "b")):
        recorder = Recorder(0, path=str(tmp_path / f"{pipeline}-rank-0{SUFFIX}"))
        _write(recorder, f"0F{number}")
    assert "0F1" in timeline(find(tmp_path))


# --- the table of a timeout


def _entry(text: str, ago: float, ready: bool) -> _core.ActionEntry:
    """The action as a status has it: begun or ended so many seconds ago."""
    action, time = A(text), round(ago * 1e9)
    return _core.ActionEntry(action.stage, action.kind.order, action.microbatch, 7, time, int(ready), time)


def _known(
    rank: int,
    now: str | None,
    *,
    last: str | None = None,
    ready: bool = False,
    silent: bool = False,
    left: bool = False,
    busy: str = "",
) -> Known:
    status = _core.RankStatus(
        rank,
        7,
        now=_entry(now, 5.0, ready) if now else None,
        last=_entry(last, 9.0, True) if last else None,
        busy=busy,
        busy_for=3.0,
    )
    return Known(status, silent, left)


PROGRAM = lower(build("1f1b", 4, 8))


def _table(*entries: Known, me: int = 0) -> list[str]:
    found = {entry.status.rank: entry for entry in entries}
    return status_table.table(found, 4, me, PROGRAM).splitlines()


def test_the_table_follows_who_waits_for_whom_to_the_one_that_does_not() -> None:
    lines = _table(
        _known(0, "0B0", last="0SEND_F3"),
        _known(1, "1B0"),
        _known(2, "2B0"),
        _known(3, "3F0", ready=True),
    )
    assert lines[0] == "It waits for rank 3, through rank 1, through rank 2: 3F0: runs."
    assert " ".join(lines[2].split()) == "0 7 0B0: waits for the gradient of 1B0 from rank 1 5.0 s 0SEND_F3, 9.0 s ago"


def test_a_rank_that_is_silent_or_unknown_is_marked() -> None:
    lines = _table(_known(0, "0B0"), _known(1, "1F2", silent=True), _known(2, "2F2"))
    assert lines[0].startswith("It waits for rank 1, which does not answer")
    assert "DOES NOT ANSWER (its record: 1F2: runs)" in lines[3]
    assert "DOES NOT ANSWER" in lines[5]


def test_a_rank_between_steps_or_busy_is_told_in_words() -> None:
    lines = _table(_known(0, "0B0"), _known(1, None, last="1SEND_B7"), _known(2, None, busy="compiling"))
    assert lines[0] == "It waits for rank 1: between steps: has not called step() or eval() again."
    assert "busy: compiling" in lines[4]


def test_ranks_that_wait_for_each_other_are_named() -> None:
    lines = _table(_known(0, "0B0"), _known(1, "1F0"))
    assert lines[0] == "Ranks 0, 1, 0 wait for each other."


def test_a_sender_waits_for_room() -> None:
    lines = _table(_known(0, "0SEND_F2"), _known(1, "1F0", ready=True))
    assert "0SEND_F2: waits for room for the message from rank 1" in lines[2]


def test_a_rank_that_has_left_is_told_so() -> None:
    lines = _table(_known(0, "0B0"), _known(1, None, last="1SEND_B7", silent=True, left=True))
    assert lines[0] == "It waits for rank 1, which has left: it closed its schedule."
    assert "1  7  has left: it closed its schedule" in re.sub(" {3,}", "  ", lines[3])


def test_who_asks_without_waiting_is_not_said_to_wait() -> None:
    found = {0: _known(0, "0F1", ready=True), 1: _known(1, "1F1", ready=True)}
    assert "0F1: runs" in status_table.table(found, 4, 0, PROGRAM, waits=False)
    assert "0F1: waits" in status_table.table(found, 4, 0, PROGRAM)
