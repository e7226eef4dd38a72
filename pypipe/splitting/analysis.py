"""Runs a model without weights, in both of its modes, and makes the plan of a cut."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pypipe.runtime.torch_private import pytree
from pypipe.splitting.dry_run import DryRun
from pypipe.splitting.inputs import bound, positional_names
from pypipe.splitting.plan import EVERYWHERE, Origin, Plan, Unsplittable, Value
from pypipe.splitting.untouched import calls_through, lent

__all__ = ["find_plan"]

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.jit.ScriptModule)
_HOOKS = frozenset(["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"])


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


def _run(
    run: DryRun,
    model: nn.Module,
    args: Any,
    kwargs: Any,
    output: Callable[[Any], Any] | None,
    *,
    training: bool,
) -> bool:
    """Runs the model in a mode; False where it fails in one that it is not in, where its forward() would fail too."""
    if training == model.training:
        _run_in_mode(run, model, args, kwargs, output, None)
        return True
    try:
        _run_in_mode(run, model, args, kwargs, output, training)
    except Unsplittable:
        raise
    except Exception:
        return False
    return True


def _run_in_mode(
    run: DryRun,
    model: nn.Module,
    args: Any,
    kwargs: Any,
    output: Callable[[Any], Any] | None,
    training: bool | None,
) -> None:
    def marked(tensor: Tensor, name: str) -> Tensor:
        made = tensor.detach().clone() if not tensor.is_meta else torch.zeros_like(tensor, device=run.device)
        made = made.to(run.device)
        run.tag_input(made, name)
        return made

    def marked_all(tree: Any, name: str) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: marked(tensor, name), tree)

    names = bound(positional_names(model), len(args))
    run.inputs = frozenset([*names, *kwargs])
    args = tuple(marked_all(value, name) for name, value in zip(names, args, strict=True))
    kwargs = {name: marked_all(value, name) for name, value in kwargs.items()}
    with _eagerly(), lent(model, run.parameter, run.device), calls_through(run.enter), run:
        for module in model.modules() if training is not None else ():
            module.__dict__["training"] = training
        result = model(*args, **kwargs)
        if output is not None:
            result = output(result)
        if run.glue is not None:
            run.finish(result)


def find_plan(
    model: nn.Module,
    cuts: Sequence[nn.Module],
    cut_names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Callable[[Any], Any] | None,
    device: torch.device,
) -> Plan:
    """Runs the model to find the modules that have a cut in them, and then what each stage needs; both in both modes.

    Args:
        model: the model; it is left as it was.
        cuts: before the first call of each of these modules the next stage begins.
        cut_names: their names, as they were given.
        args, kwargs: what the model is called with.
        output: picks what the last stage returns.
        device: where the model's tensors say that they are.

    Raises:
        Unsplittable: the model cannot be cut so.
    """
    given = (args, dict(kwargs), output)
    found: set[int] = {id(model)}
    for training in (not model.training, model.training):
        first = DryRun(model, cuts, device, None)
        if _run(first, model, *given, training=training):
            found |= first.cut_through
    if first.clock < len(cuts):
        missed = cut_names[first.clock]
        inside = [name for name, its in model.named_modules() if name.startswith(f"{missed}.") and first.calls[id(its)]]
        raise Unsplittable(
            f"{missed} is never called in the model's forward(), so there is no place before it"
            + (f"; the nearest is before {inside[0]}" if inside else "")
        )
    glue = frozenset(found)
    for module in model.modules():
        if id(module) in glue and any(value for name, value in vars(module).items() if name in _HOOKS):
            raise Unsplittable(
                f"{first.names[id(module)]} has hooks, and a cut in it, so that every stage would run them: put them "
                "on a module within it, or cut elsewhere"
            )
        if id(module) in glue and ("_orig_mod" in module._modules or isinstance(module, _WRAPPERS)):
            raise Unsplittable(
                f"{first.names[id(module)]} is a {type(module).__name__} around a cut: cut the module itself, and wrap "
                "or compile the stages"
            )
    for key in glue:
        if first.calls[key] > 1:
            name = first.names[key]
            raise Unsplittable(
                f"a cut is inside {name}, which runs {first.calls[key]} times in a forward(): cut before {name}"
            )
    runs: list[DryRun] = []
    for training in (True, False):
        run = DryRun(model, cuts, device, glue, runs[0] if runs else None)
        if _run(run, model, *given, training=training):
            runs.append(run)
    return _plan(runs, model, len(cuts) + 1)


def _plan(runs: Sequence[DryRun], model: nn.Module, count: int) -> Plan:
    run = runs[-1]
    busy = {stage for stages in run.roles.values() for stage in stages}
    for stage in range(count):
        if stage not in busy:
            raise Unsplittable(f"stage {stage} would have nothing to compute: move a cut")
    drawn: dict[Origin, set[int]] = defaultdict(set)
    for stage, origins in run.needs.items():
        for origin in origins:
            if origin.kind == "random":
                drawn[origin].add(stage)
    for origin, stages in drawn.items():
        if len(stages) > 1:
            raise Unsplittable(
                f"the forward() of {origin.name}, which every stage runs, draws random numbers that stages "
                f"{' and '.join(map(str, sorted(stages)))} use, and each would draw its own: draw them in a module "
                f"that it calls (torch.nn.Dropout instead of dropout()), or pass them to the model"
            )
    received: list[list[Value]] = []
    for stage in range(count):
        values = {
            origin.value
            for later in range(stage, count)
            for origin in run.needs[later]
            if origin.kind == "output" and origin.stage < stage
        }
        received.append(sorted(values, key=run.order.__getitem__))
    inputs = set(run.looked_at)
    for stage in range(1, count):
        inputs |= {origin.name for origin in run.needs[stage] if origin.kind == "input"}
    held, first_names = _held(run, model, count)
    return Plan(
        count,
        run.glue or frozenset(),
        {key: tuple(stages) for key, stages in run.roles.items()},
        run.names,
        held,
        first_names,
        received,
        frozenset(run.rewritten),
        frozenset(inputs),
        run.inputs,
        frozenset.union(*(frozenset(each.made) for each in runs))
        - frozenset.intersection(*(frozenset(each.made) for each in runs)),
    )


def _held(run: DryRun, model: nn.Module, count: int) -> tuple[dict[str, frozenset[int]], dict[str, str]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    by_id: dict[int, str] = {}
    first_names: dict[str, str] = {}
    held: dict[str, set[int]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names[name] = by_id.setdefault(id(parameter), name)
        path = name.split(".")[:-1]
        for length in range(len(path) + 1):
            roles = run.roles.get(id(modules[".".join(path[:length])]))
            if roles is not None:
                held[first].update(stage for stage in roles if stage != EVERYWHERE)
                break
    for name, stages in run.held.items():
        held[first_names[name]] |= stages
    for first in by_id.values():
        if not held[first]:  # of a module that is never called
            held[first].add(count - 1)
    return {name: frozenset(stages) for name, stages in held.items()}, first_names
