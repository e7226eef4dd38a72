"""Hard cases for autograd across stage boundaries, and the same model without a pipeline, microbatch by microbatch.

`compare()` runs on every rank. It first makes all pipelined steps, then all steps of the reference, each from the same
seeds, and compares everything that a user can see of this rank's stage: gradients of parameters and inputs, buffers,
losses, outputs, and what hooks noted down.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from autograd_base import Batch, Case, Special, nothing
from autograd_data import CASES, Plain
from autograd_hooks import HOOKS, hooked
from autograd_special import special
from random_programs import one_rank
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pypipe


def copied(value: Any) -> Any:
    def copy(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to_dense().clone() if tensor.is_sparse else tensor.clone()

    return pytree.tree_map_only(Tensor, copy, value)


def _visible(module: nn.Module, stage: int, size: int, batch: Batch) -> dict[str, Any]:
    """What a user can see of a stage after a step."""
    seen: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        seen[f"gradient of {name}"] = parameter.grad
        seen[f"parameter {name}"] = parameter
    for name, buffer in module.named_buffers():
        seen[f"buffer {name}"] = buffer
    if isinstance(module, Plain):
        seen["gradient of the plain leaf"] = module.extra.grad
    noted = getattr(module, "noted", [])
    for i, tensor in enumerate(noted):
        seen[f"note {i}"] = tensor.grad if tensor.requires_grad else tensor
    trees = [batch.kwargs.get(stage)] + [batch.args] * (stage == 0) + [batch.target] * (stage == size - 1)
    leaves = [x for x in pytree.tree_leaves(trees) if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]
    for i, leaf in enumerate(leaves + batch.leaves.get(stage, [])):
        seen[f"gradient of batch leaf {i}"] = leaf.grad
    return copied(seen)


def _build(make: Callable[[], Case], prepare: Callable[[Any], object]) -> Case:
    torch.manual_seed(0)
    case = make()
    if case.double:
        for module in case.modules:
            module.double()
    for module in case.modules:
        if isinstance(module, Special):
            prepare(module)
    return case


def _held(rank: int, size: int, group: Any, name: str, case: Case) -> tuple[dict[int, nn.Module], Any]:
    """This rank's modules by their stage, and a schedule for them; on one rank there may be several stages."""
    count = len(case.modules)
    held = {stage: case.modules[stage] for stage in ([rank] if size == count else range(count))}
    stages = [
        pypipe.PipelineStage(module, stage, count, torch.device("cpu"), group=group) for stage, module in held.items()
    ]
    options = {"loss_fn": case.loss, "scale_grads": case.scale_grads, "timeout": 10, **case.schedule_kwargs}
    if size == count:
        return held, getattr(pypipe, name)(stages[0], n_microbatches=case.n_microbatches, **options)
    program = one_rank(count, case.n_microbatches, split=name == "I and W")
    return held, pypipe.Schedule(program, stages, case.n_microbatches, **options)


def _with_random_numbers_of_its_own(module: nn.Module, stage: int) -> None:
    """Stages on one rank draw from streams of their own, as stages on several ranks do."""
    torch.manual_seed(1000 + stage)
    states = [torch.get_rng_state()]

    def exchange(*_: Any) -> None:
        states.append(torch.get_rng_state())
        torch.set_rng_state(states.pop(0))

    module.register_forward_pre_hook(exchange)
    module.register_forward_hook(exchange)


def _pipelined(rank: int, size: int, group: Any, schedule_name: str, case: Case) -> list[dict[int, dict[str, Any]]]:
    """What is to be seen of each of this rank's stages after each step."""
    held, schedule = _held(rank, size, group, schedule_name, case)
    count = len(case.modules)
    for stage, module in held.items():
        _with_random_numbers_of_its_own(module, stage)
    seen: list[dict[int, dict[str, Any]]] = []
    with schedule:
        for step in range(case.steps):
            torch.manual_seed(100 + step)
            batch = case.batch(step)
            losses: list[Tensor] = []
            kwargs = {name: value for stage in held for name, value in batch.kwargs.get(stage, {}).items()}
            with case.around():
                output = schedule.step(
                    *batch.args, target=batch.target, losses=losses, loss_kwargs=case.loss_kwargs, **kwargs
                )
            seen.append({})
            for stage, module in held.items():
                case.after(module, step)
                results = {"losses": copied(losses), "output": copied(output)}
                if stage < count - 1 and count > size:
                    results = {"losses": [], "output": None}
                seen[-1][stage] = {**_visible(module, stage, count, batch), **results}
        schedule.eval(*batch.args, **kwargs)
        # Whatever arrived in the slots since must not have changed what the user holds.
        seen.append({})
        for stage, module in held.items():
            visible = _visible(module, stage, count, batch)
            seen[-1][stage] = {key: value for key, value in visible.items() if "note" in key or "grad" in key}
    return seen


def _split(case: Case, batch: Batch, size: int) -> list[tuple[Any, list[Any], Any]]:
    from torch.distributed.pipelining import microbatch as peer

    count = case.n_microbatches
    specs = case.schedule_kwargs

    def spec(values: Any, given: Any) -> Any:
        def one(value: Any, dim: Any) -> Any:
            if isinstance(dim, pypipe.Replicate) or not isinstance(value, Tensor) or value.dim() == 0:
                return peer._Replicate()
            return peer.TensorChunkSpec(dim.split_dim if dim else 0)

        if given is None:
            return pytree.tree_map(lambda value: one(value, None), values)
        if isinstance(values, dict):
            return {key: one(value, given.get(key)) for key, value in values.items()}
        return tuple(one(value, dim) for value, dim in zip(values, given, strict=True))

    args_spec = spec(batch.args, specs.get("args_chunk_spec"))
    if batch.args:
        args, _ = peer.split_args_kwargs_into_chunks(batch.args, {}, count, args_spec, {})
    else:
        args = [()] * count
    kwargs: list[list[Any]] = [[{}] * size for _ in range(count)]
    for stage, named in batch.kwargs.items():
        named_spec = spec(named, specs.get("kwargs_chunk_spec"))
        _, chunks = peer.split_args_kwargs_into_chunks(
            (torch.empty(count),), named, count, (peer.TensorChunkSpec(0),), named_spec
        )
        for microbatch, chunk in enumerate(chunks):
            kwargs[microbatch] = [*kwargs[microbatch][:stage], chunk, *kwargs[microbatch][stage + 1 :]]
    rows = batch.rows
    sizes = [len(chunk) for chunk in torch.tensor_split(torch.empty(rows), count)]
    columns = [torch.split(leaf, [n * (len(leaf) // rows) for n in sizes]) for leaf in pytree.tree_leaves(batch.target)]
    structure = pytree.tree_flatten(batch.target)[1]
    targets = [pytree.tree_unflatten(list(chunk), structure) for chunk in zip(*columns, strict=True)]
    return list(zip(args, kwargs, targets, strict=True))


def _reference(rank: int, size: int, case: Case, backwards_in_reverse: bool) -> list[dict[str, Any]]:
    rngs = []
    for stage in range(size):
        torch.manual_seed(1000 + stage)
        rngs.append(torch.get_rng_state())

    def forward(args: Any, kwargs: list[Any]) -> Any:
        value: Any = tuple(x.clone() if isinstance(x, Tensor) and not x.requires_grad else x for x in args)
        for stage, module in enumerate(case.modules):
            torch.set_rng_state(rngs[stage])
            value = module(*value, **kwargs[stage]) if isinstance(value, tuple) else module(value, **kwargs[stage])
            rngs[stage] = torch.get_rng_state()
        return value

    seen: list[dict[str, Any]] = []
    for step in range(case.steps):
        torch.manual_seed(100 + step)
        batch = case.batch(step)
        rows = batch.rows
        shares = [len(chunk) / rows for chunk in torch.tensor_split(torch.empty(rows), case.n_microbatches)]
        losses: list[Tensor] = []
        outputs: list[Any] = []
        pieces = _split(case, batch, size)
        if case.whole:
            clone = pytree.tree_map_only(Tensor, lambda x: x if x.requires_grad else x.clone(), pieces)
            with case.around(), torch.no_grad():
                for args, kwargs, target in clone:
                    args = pytree.tree_map_only(Tensor, torch.clone, args)
                    outputs.append(forward(args, kwargs))
                    losses.append(case.loss(outputs[-1], target, **(case.loss_kwargs or {})))
            with case.around():
                whole = forward(batch.args, [batch.kwargs.get(stage, {}) for stage in range(size)])
                loss = case.loss(whole, batch.target, **(case.loss_kwargs or {}))
            loss.backward()
        else:
            graphs = []
            for args, kwargs, target in pieces:
                with case.around():
                    output = forward(args, kwargs)
                    loss = case.loss(output, target, **(case.loss_kwargs or {}))
                outputs.append(copied(output))
                losses.append(loss.detach().clone())
                graphs.append(loss)
            del output, loss
            backwards = list(zip(shares, graphs, strict=True))
            for share, loss in reversed(backwards) if backwards_in_reverse else backwards:
                start = torch.full_like(loss, share if case.scale_grads else 1.0)
                loss.backward(start, retain_graph=bool(batch.leaves))
        case.after(case.modules[rank], step)
        for stage, module in enumerate(case.modules):
            if stage != rank:
                case.after(module, step)
        last = rank == size - 1
        seen.append(
            {
                **_visible(case.modules[rank], rank, size, batch),
                "losses": copied(losses) if last else [],
                "output": copied(case.join(outputs)) if last else None,
            }
        )
    seen.append({key: value for key, value in seen[-1].items() if "note" in key or "grad" in key})
    return seen


def _worst(a: Any, b: Any) -> float:
    """The largest difference, relative to the largest value."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return 0.0 if a == b else float("inf")
    if a.dtype != b.dtype or a.shape != b.shape:
        return float("inf")
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.flatten()[:4].tolist()}"
    return repr(value)


def note_differences(name: str, case: Case, mine: dict[str, Any], theirs: dict[str, Any], out: list[str]) -> None:
    if list(mine) != list(theirs):
        out.append(f"{name}: only one of the runs has {set(mine) ^ set(theirs)}")
    for key in mine.keys() & theirs.keys():
        a, a_spec = pytree.tree_flatten(mine[key])
        b, b_spec = pytree.tree_flatten(theirs[key])
        if a_spec != b_spec:
            out.append(f"{name}: {key} is {_show(mine[key])} instead of {_show(theirs[key])}")
            continue
        for x, y in zip(a, b, strict=True):
            worst = _worst(x, y)
            if not worst <= case.tolerance:
                out.append(f"{name}: {key} differs by {worst:.3g}: {_show(x)} instead of {_show(y)}")


def compare(
    rank: int,
    size: int,
    group: Any,
    kind: str,
    name: str,
    places: list[int],
    schedules: list[str],
    link: str,
    count: int | None = None,
) -> list[str]:
    """What differs, in words, for a case at several places, with several schedules, over one link.

    `count` stages are on one rank, where it is given; then the schedules are "B" and "I and W".
    """
    count = count or size
    warnings.simplefilter("ignore")
    found: list[str] = []
    for place in places:
        for schedule in schedules:

            def make(place: int = place) -> Case:
                if kind == "special":
                    return special(name, place, count)
                return hooked(name, place, count) if kind == "hook" else CASES[name](count)

            prepare = HOOKS[name][1] if kind == "hook" else nothing
            where = f"rank {rank}, {schedule}" + (f", special stage {place}" if kind != "case" else "")
            try:
                with patch.dict(os.environ, PYPIPE_LINK=link):
                    mine = _pipelined(rank, size, group, schedule, _build(make, prepare))
            except Exception:
                # The other ranks fail too and go on to the next place, as this one does.
                found.append(f"{where}: the pipelined run raised\n{traceback.format_exc(limit=-3)}")
                continue
            for stage in mine[0]:
                case = _build(make, prepare)
                theirs = _reference(stage, count, case, schedule == "ScheduleGPipe")
                for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                    when = f"step {step}" if step < case.steps else "after a later eval()"
                    note_differences(f"{where}, stage {stage}, {when}", case, a[stage], b, found)
    return found
