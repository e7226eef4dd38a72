"""One run of a model without weights, which finds out what a cut means for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pypipe.runtime.batch.structure import map_tensors
from pypipe.runtime.torch_private import pytree
from pypipe.splitting.hollow import HollowMode, emptied, key_of
from pypipe.splitting.operations import is_only_made_like, is_random, reads_values, written_tensors
from pypipe.splitting.plan import EVERYWHERE, Origin, Unsplittable, Value

__all__ = ["DryRun"]

Origins = frozenset[Origin]
_NONE: Origins = frozenset()


class _Unit(NamedTuple):
    """A module that a stage runs as a whole, while it runs."""

    name: str
    call: int
    stage: int


class DryRun(HollowMode):
    """One run of the model; where `glue` is None, only one that finds out which modules have a cut in them.

    A run after an `earlier` one, of the model in the other mode (train or eval), adds to what that has found.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Sequence[nn.Module],
        device: torch.device,
        glue: frozenset[int] | None,
        earlier: DryRun | None = None,
    ) -> None:
        super().__init__(device)
        self.names: dict[int, str] = {}
        for name, module in model.named_modules():
            self.names[id(module)] = name or type(model).__name__
        self.cuts = {id(module): number for number, module in enumerate(cuts, 1)}
        self.glue = glue
        self.clock = 0  # the stage that the model is in
        self.cut_through: set[int] = set()
        self.calls: dict[int, int] = defaultdict(int)
        self.made: set[Value] = set()
        self.is_second = earlier is not None
        if earlier is None:
            self.roles: dict[int, list[int]] = defaultdict(list)
            self.needs: dict[int, set[Origin]] = defaultdict(set)
            self.looked_at: set[str] = set()
            self.rewritten: set[Value] = set()
            self.held: dict[str, set[int]] = defaultdict(set)
            self.order: dict[Value, int] = {}
        else:
            self.roles, self.needs, self.looked_at = earlier.roles, earlier.needs, earlier.looked_at
            self.rewritten, self.held, self.order = earlier.rewritten, earlier.held, earlier.order
        self.inputs: frozenset[str] = frozenset()
        self._open: list[nn.Module] = []
        self._unit: _Unit | None = None
        self._given: Origins = _NONE  # what its arguments were computed from
        self._tags: dict[int, Origins] = {}
        self._inputs: set[int] = set()
        self._kept: list[Any] = []  # so that no storage's key is used again

    # Calls of modules.

    def enter(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module's call."""
        name = self.names.get(id(module))
        if name is None:
            return self.guarded(module, call, args, kwargs)
        self._pass_cut(module, name)
        number = self.calls[id(module)]
        self.calls[id(module)] = number + 1
        if self._unit is not None:
            return self.guarded(module, call, args, kwargs)
        if self.glue is not None and id(module) not in self.glue:
            return self._run_unit(_Unit(name, number, self.clock), module, call, args, kwargs)
        self._open.append(module)
        try:
            return self.guarded(module, call, args, kwargs) if self.glue is None else call(module, *args, **kwargs)
        finally:
            self._open.pop()

    def _pass_cut(self, module: nn.Module, name: str) -> None:
        number = self.cuts.get(id(module))
        if number is None or number <= self.clock:
            return
        if number != self.clock + 1:
            missed = next(self.names[key] for key, its in self.cuts.items() if its == self.clock + 1)
            raise Unsplittable(
                f"the cuts are out of order: {name} runs before {missed}. Name modules in the order in which forward() "
                "first calls them"
            )
        self.clock = number
        self.cut_through.update(id(each) for each in self._open)

    def _run_unit(self, unit: _Unit, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        taken = self._origins(pytree.tree_leaves((args, kwargs)))
        self._unit = unit
        self._given = self._origins(_tensors((args, kwargs)))
        try:
            output = self.guarded(module, call, args, kwargs)
        finally:
            self._unit = None
        found = self._origins(_tensors(output))
        has_weights = next(module.parameters(), None) is not None
        known = self.roles[id(module)]
        is_free = not has_weights and not any(map(_depends, found))
        if unit.call == len(known):
            known.append(EVERYWHERE if is_free else unit.stage)
        elif known[unit.call] != unit.stage and not (is_free and known[unit.call] == EVERYWHERE):
            raise Unsplittable(
                f"{unit.name} runs in stage {known[unit.call]} in one of train() and eval(), and in stage {unit.stage} "
                "in the other: cut elsewhere"
            )
        if known[unit.call] == EVERYWHERE:
            return output
        self._consume(taken | {origin for origin in found if origin.kind != "inside"}, unit.stage, unit)
        leaf = -1

        def cut_off(tensor: Tensor) -> Tensor:
            nonlocal leaf
            leaf += 1
            its = self._origins([tensor])
            made = emptied(tensor, self.device) if any(map(_depends, its)) or has_weights else tensor.clone()
            origin = Origin("output", unit.name, unit.call, leaf, unit.stage)
            self.order.setdefault(origin.value, len(self.order))
            self.made.add(origin.value)
            self._tag(made, frozenset([origin]), add=False)
            return made

        return map_tensors(output, cut_off)

    # Operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.glue is None:
            return self.run(func, args, kwargs, made_real=self._unit is None)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        origins = self._origins(given)
        unit = self._unit
        if unit is not None:
            self._consume(origins, unit.stage, unit)
        elif reads_values(func, given):
            self.looked_at.update(origin.name for origin in origins if origin.kind == "input")
            if any(map(_depends, origins)):
                self.look(func)
        before = self.looked
        output = self.run(func, args, kwargs, made_real=unit is None)
        if is_only_made_like(func):
            origins = _NONE
        if is_random(func, args, kwargs):
            place = unit.name if unit is not None else self._place()
            origins = origins | {Origin("random", place, int(self.is_second), len(self._kept), self.clock)}
        if unit is not None and (any(map(_depends, origins)) or self.looked > before):
            origins = frozenset([Origin("inside", unit.name, unit.call, 0, unit.stage)])
        written = written_tensors(func, args, kwargs)
        if written and unit is None:
            self._write(written)
        seen = {key_of(tensor) for tensor in given} if unit is not None else ()
        for tensor in _tensors(output):
            if key_of(tensor) not in seen:  # a module's view of what it was given is still that
                self._tag(tensor, origins)
        for tensor in written:
            self._tag(tensor, origins)
        return output

    def look(self, func: Any) -> None:
        """Refuses it where every stage would have to look."""
        super().look(func)
        if self.glue is not None and self._unit is None:
            raise Unsplittable(
                f"the forward() of {self._place()}, which has a cut in it and therefore runs in every stage, looks at "
                f"a value that depends on weights or on random numbers ({func}): do that within a module that it "
                f"calls, or cut before or after {self._place()}"
            )

    def _write(self, written: Sequence[Tensor]) -> None:
        if any(key_of(tensor) in self._inputs for tensor in written):
            raise Unsplittable(
                f"the forward() of {self._place()}, which every stage runs, changes an input of the model in place: "
                "clone() it first"
            )
        self.rewritten.update(o.value for o in self._origins(written) if o.kind == "output")

    def _place(self) -> str:
        return self.names[id(self._open[-1])] if self._open else "the model"

    # What a tensor was computed from.

    def tag_input(self, tensor: Tensor, name: str) -> None:
        """Says that a tensor is an input of the model."""
        self._tag(tensor, frozenset([Origin("input", name, 0, 0, -1)]))
        if (key := key_of(tensor)) is not None:
            self._inputs.add(key)

    def parameter(self, name: str, parameter: Tensor) -> Tensor:
        """What stands for a parameter."""
        made = emptied(parameter, self.device)
        made._is_param = True  # isinstance(..., nn.Parameter)
        self._tag(made, frozenset([Origin("parameter", name, 0, 0, 0)]))
        return made

    def _tag(self, tensor: Tensor, origins: Origins, *, add: bool = True) -> None:
        key = key_of(tensor)
        if key is None:
            return
        self._kept.append(tensor)
        self._tags[key] = (self._tags.get(key, _NONE) | origins) if add else origins

    def _origins(self, leaves: Sequence[Any]) -> Origins:
        found: set[Origin] = set()
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                found |= self._tags.get(key_of(leaf) or 0, _NONE)
        return frozenset(found)

    def _consume(self, origins: Origins, stage: int, unit: _Unit | None) -> None:
        """Something of a stage needs what has these origins."""
        for origin in origins:
            if origin.kind == "inside":
                if origin.stage < stage:
                    who = f"{unit.name} (stage {stage})" if unit is not None else "the model's output"
                    raise Unsplittable(
                        f"a tensor goes round the cut: {who} uses one that {origin.name} (stage {origin.stage}) made "
                        "and did not return, but kept in an attribute, a cache or another object, or changed in place. "
                        + (
                            f"Return it from {origin.name}, or cut so that both are in one stage"
                            if unit is not None
                            else "Leave it out of the output (for a cache: use_cache=False), or pick what the last "
                            "stage returns: output=lambda out: out.logits"
                        )
                    )
            elif origin.kind == "output" and unit is not None and origin not in self._given:
                raise Unsplittable(
                    f"{unit.name} uses {origin.value}, which it is not given as an argument, but finds in an attribute "
                    "or another object: pass it as an argument"
                )
            elif origin.kind == "parameter":
                self.held[origin.name].add(stage)
            else:
                self.needs[stage].add(origin)

    def finish(self, output: Any) -> None:
        """Takes the model's output into account."""
        found: Origins = self._origins(_tensors(output) or pytree.tree_leaves(output))
        self._consume(found, self.clock, None)


def _depends(origin: Origin) -> bool:
    return origin.kind != "input"


def _tensors(tree: Any) -> list[Tensor]:
    """All tensors in it, also in objects such as caches."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def walk(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            found.append(value)
        elif id(value) not in seen and depth < 8 and not isinstance(value, (str, bytes, int, float, nn.Module, type)):
            seen.add(id(value))
            if isinstance(value, dict):
                children = list(value.values())
            elif isinstance(value, (list, tuple, set, frozenset)):
                children = list(value)
            else:
                children = list(getattr(value, "__dict__", {}).values())
            for child in children:
                walk(child, depth + 1)

    walk(tree, 0)
    return found
