"""The wrapper around one stage of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pypipe.errors import ConfigurationError
from pypipe.runtime.rendezvous.exchange import refuse
from pypipe.runtime.rendezvous.global_names import GlobalNames, Prefix
from pypipe.runtime.rendezvous.liveness import declare
from pypipe.runtime.rendezvous.world import find_world

__all__ = ["PipelineStage"]


class PipelineStage:
    """One contiguous piece of a model, on one device of one rank.

    What crosses the boundaries between stages is found out as it happens: any nesting of tuples, lists and dicts of
    tensors, numbers, strings and None, of any shape and dtype, other shapes at any microbatch. What one stage returns
    is what the next stage's forward() is called with (a tuple or list as positional arguments).

    Args:
        submodule: the module that computes this stage.
        stage_index: which stage it is, from 0.
        num_stages: how many stages the model has.
        device: where the module lives, for example torch.device("cpu"). "cuda" is the GPU that is current now.
            Default: the device of the module's first parameter, or the CPU if it has none.
        input_args, output_args, output_grads, input_grads: taken for compatibility with torch.distributed.pipelining
            and not needed: shapes are agreed when the first message is sent, without a trial run.
        group: the ranks of this pipeline. Default: the default process group, else torchrun's environment.
        dw_builder: taken for compatibility and not needed.
        get_mesh: where the stage before returns DTensors: called as get_mesh(names, None) with the names of a mesh's
            dimensions, it returns this rank's mesh of that name. Needed only for meshes on which no parameter of this
            stage lies.
        prefix: what the whole model calls this stage's content: a path before every local name ("layers.0"; a dot at
            its end changes nothing), or a mapping from local paths to global ones ({"0": "model.layers.4"}), of which
            the longest match wins. Checkpoints use it. Default: local names.

    Raises:
        ConfigurationError: an argument is out of range, a key of `prefix` matches nothing or two names become one, or
            this process is not in the group.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str | None = None,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: Any = None,
        dw_builder: Any = None,
        get_mesh: Callable[..., Any] | None = None,
        prefix: Prefix | None = None,
    ) -> None:
        world = find_world(group)
        where = f"rank {world.rank}"
        problem = None
        if not isinstance(submodule, nn.Module):
            problem = f"{where}: a stage wraps a torch.nn.Module, not a {type(submodule).__name__}"
        elif not isinstance(num_stages, int) or num_stages < 1:
            problem = f"{where}: num_stages is {num_stages!r}; a pipeline has 1 stage or more"
        elif not isinstance(stage_index, int) or not 0 <= stage_index < num_stages:
            problem = (
                f"{where}: stage_index is {stage_index!r}, but with num_stages={num_stages} stages are numbered "
                f"0..{num_stages - 1}"
            )
        else:
            try:
                self.device = _with_index(torch.device(device) if device is not None else _device_of(submodule))
            except (RuntimeError, TypeError) as error:
                problem = (
                    f"{where}, stage {stage_index}: device={device!r} is not valid ({error}); give torch.device('cpu')"
                )
            else:
                if self.device.type == "meta":
                    problem = f"{where}, stage {stage_index}: a meta device computes nothing; give torch.device('cpu')"
        if not problem:
            try:
                self.names = GlobalNames(submodule, prefix)
            except ValueError as error:
                problem = f"{where}, stage {stage_index}: {error}"
        if problem:
            refuse(world, problem)
            raise ConfigurationError(problem)
        declare(world)
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group = group
        self.world = world
        self.get_mesh = get_mesh

    @property
    def is_first(self) -> bool:
        """Whether this stage takes the batch itself."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage's output goes to the loss."""
        return self.stage_index == self.num_stages - 1

    def global_names(self) -> dict[str, str]:
        """The global name of every parameter and buffer, by its local name, both without what wrappers add."""
        module = self.submod
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        return {local: self.names.of(local) for local in (self.names.local_of(name) for name, _ in named)}

    def __repr__(self) -> str:
        name = type(self.submod).__name__
        return f"PipelineStage({self.stage_index} of {self.num_stages}, {name}, {self.device})"


def _with_index(device: torch.device) -> torch.device:
    """The device itself; for "cuda" the one that is current now, whatever is current later."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _device_of(module: nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")
