"""pypipe.split(): a model's stages, by the names of the modules that begin them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pypipe.errors import ConfigurationError
from pypipe.runtime.rendezvous.exchange import refuse
from pypipe.runtime.rendezvous.world import find_world
from pypipe.runtime.transport.distributed_tensors import is_distributed
from pypipe.splitting.analysis import find_plan
from pypipe.splitting.cuts import find_cuts, stages_of_rank
from pypipe.splitting.plan import Plan, Unsplittable
from pypipe.splitting.stage_module import make_stage_module
from pypipe.splitting.weights import keep_weights
from pypipe.stage import PipelineStage
from pypipe.ties import tie

__all__ = ["split"]


def split(
    model: nn.Module,
    at: Sequence[str | nn.Module] | nn.ModuleList | str | None = None,
    *,
    group: Any = None,
    placement: str | Sequence[int] | Callable[[int, int], int] | None = None,
    output: Callable[[Any], Any] | None = None,
    example: Any = None,
    device: torch.device | str | None = None,
) -> list[PipelineStage]:
    """Cuts a model into stages by naming modules, without changing or tracing it.

    Every stage runs the model's own forward(). Modules of other stages have no weights there: before the stage they
    hand out what came from them, or tensors of the right shapes; at its end the forward stops. What has to travel is
    found out in one run without weights, at once, on any machine. A parameter keeps its name in the whole model.

    The model is taken over: parameters of stages that this rank does not hold are released. A model on the meta device
    gets memory for the parameters and buffers of this rank's stages alone, which you then load by name.

    Args:
        model: any module.
        at: the modules, or their names, before whose first call the model is cut, in the order in which they run: S - 1
            of them for S stages. Or a ModuleList, or its name, which is cut evenly into one stage for each rank (two
            with placement="v"). Default: the layers that a Hugging Face configuration names in `base_model_pp_plan`,
            else the longest ModuleList.
        group: the ranks of this pipeline. Default: the default process group, else torchrun's environment.
        placement: which rank holds which stage. "loop": stage s on rank s mod P. "v": the stages r and 2P - 1 - r on
            rank r (ZB-V, V-Half, V-Min, DualPipeV). "bidirectional": r and P - 1 - r (DualPipe). Or the rank of each
            stage, as a list or a function of the stage and P. Default: "loop".
        output: called with what the model returns; the last stage returns its result: `lambda out: out.logits`.
        example: what the model is called with: a tensor, a tuple of positional arguments, a dict of keyword arguments,
            or a pair of both. Any small batch does, if the model does the same with it as in training. Default: what
            a Hugging Face model has as `dummy_inputs`.
        device: where this rank's stages live. Default: where the model's first parameter is, or the CPU if that is on
            the meta device.

    Returns:
        This rank's stages, in the order in which the schedules take them.

    Raises:
        ConfigurationError: the model cannot be cut there; the message says why, and where it can be.
    """
    world = find_world(group)
    try:
        _require_plain(model)
        args, kwargs = _example(model, example)
        cuts, names = find_cuts(model, at, placement, world.size)
        held = stages_of_rank(placement, len(cuts) + 1, world.rank, world.size)
        where = torch.device(device) if device is not None else _device_of(model)
        plan = find_plan(model, cuts, names, args, kwargs, output, where)
        keep_weights(model, plan, held, where)
        modules = [make_stage_module(model, plan, stage, output, where) for stage in held]
        for module in modules:
            _tie(plan, module)
    except Unsplittable as error:
        problem = f"rank {world.rank}: split(): {error}"
        refuse(world, problem)
        raise ConfigurationError(problem) from error
    return [
        PipelineStage(module, stage, len(cuts) + 1, where, group=group)
        for module, stage in zip(modules, held, strict=True)
    ]


def _require_plain(model: Any) -> None:
    """Refuses what is no module, and weights that are sharded already."""
    if not isinstance(model, nn.Module):
        raise Unsplittable(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    for name, parameter in model.named_parameters():
        if is_distributed(parameter):
            raise Unsplittable(f"{name} is a DTensor: cut the model first, and shard the stages")


def _example(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if example is None:
        example = getattr(model, "dummy_inputs", None)
        if example is None:
            raise Unsplittable(
                "example= is needed: what the model is called with, such as example=(torch.zeros(2, 8),)"
            )
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        if len(example) == 2 and isinstance(example[0], (tuple, list)) and isinstance(example[1], Mapping):
            return tuple(example[0]), dict(example[1])
        return tuple(example), {}
    raise Unsplittable(f"example= is a {type(example).__name__}: give a tensor, a tuple, a dict, or a pair of both")


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return parameter.device if parameter is not None and not parameter.is_meta else torch.device("cpu")


def _tie(plan: Plan, module: nn.Module) -> None:
    """Ties the parameters that other stages use too, by their names in the whole model."""
    tied = plan.tied()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = plan.first_names[name]
        if first in tied:
            tie(parameter, first)
