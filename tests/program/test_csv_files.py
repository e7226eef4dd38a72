"""Programs as CSV: what is read, what is left out, and how a wrong cell is reported."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypipe.errors import PipelineError
from pypipe.program import (
    Chain,
    Program,
    ProgramError,
    build,
    builder_names,
    dump_csv,
    dumps_csv,
    load_csv,
    loads_csv,
    lower,
    verify,
)


@given(st.sampled_from(builder_names()), st.sampled_from([2, 4]), st.integers(2, 6), st.booleans())
def test_every_program_survives_its_csv(name: str, n_ranks: int, n_microbatches: int, is_lowered: bool) -> None:
    program = build(name, n_ranks, n_microbatches)
    if is_lowered:
        program = lower(program)
    assert loads_csv(dumps_csv(program), name=name) == program


def test_a_file_is_named_after_its_path_and_placed_by_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    program = load_csv(path)
    assert (program.name, program.placement, program.n_microbatches) == ("mine", (0, 1, 1, 0), 1)
    verify(lower(program))
    dump_csv(program, path)
    assert path.read_bytes() == b"0F0,3F0,3B0,0B0\r\n1F0,2F0,2B0,1B0\r\n"


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0F1,0B0,0I1,0W1\n1F0,1B0,1F1,1I1,1W1\n",
        "0F0, ,0F1,,,0B0,0I1,0W1,,\n,1F0,1B0,(1F1;1I1)OVERLAP_F_B,1W1\n\n\n",
        "\ufeff# rank 0, rank 1\r\n0FORWARD0,0F1,0FULL_BACKWARD0,0BACKWARD_INPUT1,0BACKWARD_WEIGHT1\r\n"
        "1F0,1B0,1F1,1I1,1W1",
        '"0F0",0F1,0B0,0I1,0W1\n1F0,1B0,1F1,1I1,1W1\n',
    ],
)
def test_spellings_blanks_and_comments(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8")
    assert load_csv(path).text() == "0F0,0F1,0B0,0I1,0W1\n1F0,1B0,1F1,1I1,1W1"


def test_what_replicas_do_once_a_step_survives_its_csv_with_transfers_and_without() -> None:
    text = "0UNSHARD,0F0,0F1,0B0,0I1,0W1,0REDUCE_GRAD,0RESHARD\r\n1F0,1B0,1F1,1I1,1W1,1REDUCE_GRAD\r\n"
    program = loads_csv(text)
    assert dumps_csv(program) == text
    lowered = lower(program)
    verify(lowered)
    assert lowered.without_transfers() == program
    assert loads_csv(dumps_csv(lowered)) == lowered


def test_stages_without_a_microbatch_in_common_are_two_chains() -> None:
    program = loads_csv("0F0,3F1,3B1,0B0\n2F1,1F0,1B0,2B1\n")
    assert program.chains == (Chain(range(2), range(1)), Chain(range(2, 4), range(1, 2)))
    verify(lower(program))


def test_a_rank_that_does_nothing_keeps_its_row() -> None:
    program = loads_csv("0F0,0B0\n\n1F0,1B0\n")
    assert program.placement == (0, 2)
    idle_last = Program("csv", 1, (0,), (program.ranks[0], ()))
    assert loads_csv(dumps_csv(idle_last)) == idle_last


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", r"mine.csv, row 2, column 2: '1X0' is not an action: write stage, kind and microbatch"),
        ("# mine\n0F0,0B0,7\n", r"row 2, column 3: '7' is not an action: .*the kinds are F, B, I, W, SEND_F"),
        ("0F0,(0B0;oops)OVERLAP_F_B\n", r"row 1, column 2: 'oops' is not an action"),
        ("0F0,(0B0;0F1\n", r"row 1, column 2: '\(0B0;0F1' is not an action: .*\(2F0;5B1\)OVERLAP_F_B"),
        ("0F0,0B0\n1F0,0F1\n", r"row 2, column 2: '0F1': stage 0 is on rank 0 already \(.*row 1, column 1\)"),
        ("0F0,0B0\n2F0,2B0\n", r"mine.csv lists stage 2, but nowhere stage 1: number them from 0"),
        ("0F0,0F2,0B0,0B2\n", r"mine.csv lists microbatch 2, but nowhere microbatch 1"),
        ("0F0,0F999999999999,0B0\n", r"lists microbatch 999999999999, but nowhere microbatch 1"),
        ("0F0,0F" + "9" * 5000, r"row 1, column 2: '0F9+' is not an action"),
        ("", r"mine.csv lists no action: write a row for each rank"),
        ("#\n,,\n", r"mine.csv lists no action"),
    ],
)
def test_a_wrong_cell_is_named_by_file_row_and_column(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ProgramError, match=message) as error:
        load_csv(path)
    assert isinstance(error.value, PipelineError)
    assert "\n" not in str(error.value)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(b"0F0,\xff\xfe")
    with pytest.raises(ProgramError, match=r"mine.csv is no text in UTF-8 \(byte 4\)"):
        load_csv(path)


@given(st.text(alphabet='01FBIW,;()\n\r"# ENDRCV_\x00', max_size=40))
def test_no_text_ends_in_another_error(text: str) -> None:
    try:
        loads_csv(text)
    except ProgramError as error:
        assert "the text" in str(error)
