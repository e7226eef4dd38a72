"""The core's kinds of actions are the program's, which imports nothing of the core."""

from __future__ import annotations

from pypipe import _core
from pypipe.program import Kind


def test_the_cores_kinds_are_the_programs_name_by_name_and_number_by_number() -> None:
    assert {name: kind.value for name, kind in _core.ActionKind.__members__.items()} == {
        kind.label: kind.order for kind in Kind
    }
