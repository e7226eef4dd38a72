"""Programs that are nobody's class: from a CSV file as torch writes it, or from a builder of one's own."""

from __future__ import annotations

import re
from pathlib import Path

import own_program_cases as cases
import pytest
import transparency
from rank_pool import RankPool

from pypipe.program import build, dump_csv, lower


@pytest.mark.parametrize("transfers", [False, True], ids=["compute only", "with transfers"])
@pytest.mark.parametrize("name", ["interleaved_zb", "zbv", "dualpipe"])
def test_a_csv_file_trains_as_the_unpipelined_model(
    name: str, transfers: bool, tmp_path: Path, ranks: RankPool
) -> None:
    program = build(name, 2, 4)
    dump_csv(lower(program) if transfers else program, tmp_path / "mine.csv")
    if name == "dualpipe":  # a copy's gradients are both copies' sum, which cases with one copy leave out
        found = [text for texts in ranks.run(2, cases.trains, str(tmp_path / "mine.csv")) for text in texts]
    else:
        found = [
            text
            for texts in ranks.run(2, transparency.compare, str(tmp_path / "mine.csv"), "mlp", 4, 9, True)
            for text in texts
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1G0\n", "mine.csv, row 2, column 2: '1G0' is not an action"),
        (
            "0F0,2F0,2B0,0B0\n1F0,1B0\n",
            "num_stages is 2, but .* has 2 ranks: the schedule mine has 3",
        ),
        ("0F0,0B0\n1F0,1B0\n2F0,2B0\n", "the pipeline's group has 2 ranks, but the program mine has 3: build it"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", "n_microbatches is 1, but the program mine has 2"),
        ("0F0,0B0\n1F0\n", "mine: rank 1"),
        ("0B0,0F0\n1F0,1B0\n", "0B0"),
    ],
    ids=["cell", "stages", "ranks", "microbatches", "incomplete", "order"],
)
def test_a_csv_file_that_does_not_fit_is_refused_on_every_rank(
    text: str, message: str, tmp_path: Path, ranks: RankPool
) -> None:
    (tmp_path / "mine.csv").write_text(text)
    for raised in ranks.run(2, cases.refused, str(tmp_path / "mine.csv")):
        assert raised.startswith("ConfigurationError"), raised
        assert re.search(message, raised), raised


def test_a_builder_of_ones_own_trains_by_its_name(ranks: RankPool) -> None:
    found = [text for texts in ranks.run(2, cases.registered) for text in texts]
    assert not found, "\n".join(found)
