"""The API reference has every public name. That the pages build without a warning is seen to by `.ci/docs`."""

from __future__ import annotations

import re

import pytest
from search_path import ROOT

import pypipe

PAGE = (ROOT / "docs" / "api.md").read_text()


@pytest.mark.parametrize("name", [name for name in pypipe.__all__ if name != "__version__"])
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert re.search(rf"^\.\. auto(class|exception|function):: {name}$", PAGE, re.MULTILINE)


def test_the_reference_has_no_name_that_is_not_public() -> None:
    named = re.findall(r"^\.\. auto(?:class|exception|function):: (\w+)$", PAGE, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == {*pypipe.__all__} - {"__version__"}
