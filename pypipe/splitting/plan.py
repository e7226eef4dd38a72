"""What a dry run finds out: which module runs in which stage, and which values travel."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["EVERYWHERE", "Origin", "Plan", "Unsplittable", "Value"]

EVERYWHERE = -1
"""Instead of a stage: a call that depends on no weight, which every stage makes for itself."""


class Unsplittable(Exception):
    """The model cannot be cut so; the message says why, and what can be done."""


class Value(NamedTuple):
    """A tensor that a module returned: the module's name, which of its calls, which of the tensors it returned."""

    name: str
    call: int
    leaf: int

    def __str__(self) -> str:
        again = f" (call {self.call})" if self.call else ""
        return f"tensor {self.leaf} that {self.name}{again} returned"


class Origin(NamedTuple):
    """What a tensor was computed from.

    Attributes:
        kind: "output" of a module; made "inside" one; a "parameter"; "random" numbers; an "input" of the model.
        name: of the module, the parameter or the input.
        call: which of the module's calls.
        leaf: which of the tensors that it returned.
        stage: where it arose.
    """

    kind: str
    name: str
    call: int
    leaf: int
    stage: int

    @property
    def value(self) -> Value:
        """Of an output: the tensor."""
        return Value(self.name, self.call, self.leaf)


@dataclass
class Plan:
    """How a model is cut.

    Attributes:
        num_stages: S.
        glue: ids of modules whose forward has a cut in it, so that every stage runs it.
        roles: by id of a module that those call, the stage of each of its calls, or EVERYWHERE.
        names: by id of a module, its name.
        held: by name of a parameter, the stages that have it; of one with several names, by the first.
        first_names: by each name of a parameter, its first one.
        received: for each stage, what it receives, in order.
        rewritten: those values that the model changes in place, outside of the modules that it calls.
        inputs: names of the model's inputs of which later stages need the values; shapes of the others suffice.
        known_inputs: names of all inputs that the dry run had.
        optional: values that are computed in only one of train() and eval().
    """

    num_stages: int
    glue: frozenset[int]
    roles: Mapping[int, Sequence[int]]
    names: Mapping[int, str]
    held: Mapping[str, frozenset[int]]
    first_names: Mapping[str, str]
    received: Sequence[Sequence[Value]]
    rewritten: frozenset[Value] = frozenset()
    inputs: frozenset[str] = frozenset()
    known_inputs: frozenset[str] = field(default_factory=frozenset)
    optional: frozenset[Value] = frozenset()

    def sent(self, stage: int) -> Sequence[Value]:
        """What a stage sends on."""
        return self.received[stage + 1] if stage + 1 < self.num_stages else ()

    @functools.cached_property
    def digest(self) -> str:
        """The same on two ranks that have cut the same model in the same way."""
        roles = sorted((self.names[key], list(stages)) for key, stages in self.roles.items())
        held = sorted((name, sorted(stages)) for name, stages in self.held.items())
        what = repr((self.num_stages, roles, held, [list(values) for values in self.received], sorted(self.inputs)))
        return hashlib.sha256(what.encode()).hexdigest()[:16]

    def tied(self) -> dict[str, frozenset[int]]:
        """Parameters that several stages have."""
        return {name: stages for name, stages in self.held.items() if len(stages) > 1}
