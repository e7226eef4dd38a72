"""Refuses, by name, modules that would compute wrong numbers in a stage."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from pypipe.runtime.data_parallel.foreign_ranks import foreign_ranks

__all__ = ["refused_copy", "refused_mesh", "refused_module", "refused_now"]


def refused_module(module: nn.Module, others: frozenset[int]) -> str | None:
    """Why a stage's module cannot be trained here, and what to do; None where it can.

    Args:
        module: the stage's.
        others: the global ranks of this pipeline's other members.
    """
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_in_backward_optimizers", None):
            return (
                f"_apply_optimizer_in_backward makes an optimizer step of every microbatch's backward ({name}): use "
                "Tensor.register_post_accumulate_grad_hook, whose hooks run once a step, with the whole gradient"
            )
    has_fsdp = "torch.distributed.fsdp" in sys.modules
    for name, part in module.named_modules():
        where = f" ({name})" if name else ""
        if has_fsdp:
            from torch.distributed.fsdp import FullyShardedDataParallel

            if isinstance(part, FullyShardedDataParallel):
                return (
                    f"FullyShardedDataParallel in a stage{where} gathers and reduces in every microbatch, and cannot "
                    "be told to do so once a step: use fully_shard(module, mesh=...) instead"
                )
        if isinstance(part, nn.SyncBatchNorm) and others and dist.is_initialized():
            group = part.process_group if part.process_group is not None else dist.group.WORLD
            problem = foreign_ranks(
                "SyncBatchNorm would add up the statistics of",
                dist.get_process_group_ranks(group),
                others,
                "SyncBatchNorm.convert_sync_batchnorm(module, process_group=...)",
                where,
            )
            if problem is not None:
                return problem
    return None


def refused_mesh(module: nn.Module, others: frozenset[int]) -> str | None:
    """Why a stage's module cannot be trained on the device mesh of its DTensors; None where it can.

    Args:
        module: the stage's.
        others: the global ranks of this pipeline's other members.
    """
    for name, parameter in module.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)  # a DTensor's
        if mesh is None:
            continue
        problem = foreign_ranks(
            "parallelize_module would spread a parameter over the ranks of",
            mesh.mesh.flatten().tolist(),
            others,
            "a device mesh of the ranks that hold this stage",
            f" ({name})",
        )
        if problem is not None:
            return problem
    return None


def refused_copy(modules: Iterable[nn.Module]) -> str | None:
    """Why modules cannot be one of two copies of a stage; None where they can."""
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                return (
                    f"a lazy module ({name}) in a schedule of two model copies would be initialized differently in "
                    "each of them: initialize it before the first step, by a forward, and load one state_dict() into "
                    "both, or use ScheduleDualPipeV"
                )
    return None


def refused_now(modules: Iterable[nn.Module]) -> str | None:
    """Why modules that can be trained cannot be where a step begins; None where they can."""
    if getattr(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False):
        # It knows them by id and address, and forgets neither when it lets a tensor go. Where backwards are split, and
        # microbatches are in flight, both have soon been used again, for another microbatch's tensor.
        return (
            "torch.autograd.graph.allow_mutation_on_saved_tensors() around step() may take one microbatch's saved "
            "tensor for another's: leave it out, and clone() a tensor before you change it in place"
        )
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    if not getattr(parametrize, "_cache_enabled", 0):
        return None
    if any(hasattr(part, "parametrizations") for module in modules for part in module.modules()):
        return (
            "torch.nn.utils.parametrize.cached() around step() would give all microbatches one graph of the "
            "parametrized weights, which the first backward frees: use it in a stage's forward, or around eval()"
        )
    return None
