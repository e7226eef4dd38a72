"""All of torch's private names that pypipe uses, in one place: a new release may remove them.

Functions and classes are wrapped here, under names of pypipe's own, each with what replaces it where it is missing.
Private attributes of torch's objects stand where they are used; `ATTRIBUTES` lists them. A test,
tests/runtime/test_torch_private.py, checks that both are complete, and that the installed torch has them. Tried with
torch 2.6, the lower bound, and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "ATTRIBUTES",
    "AccumulateGrad",
    "FunctionBase",
    "SavedTensor",
    "TorchDispatchMode",
    "are_modes_active",
    "count_nodes_made",
    "default_store",
    "engine",
    "is_any_autocast_enabled",
    "no_torch_function",
    "pytree",
    "storage_key",
    "storage_uses",
    "unsafe_view",
    "unscale",
    "without_modes",
    "wrapper_tensor",
]

engine: Any = torch.autograd.Variable._execution_engine
"""Runs backwards. torch.autograd.backward() spends more time on checking its arguments in Python than a small stage's
backward takes; the engine checks shapes and dtypes itself. Without it: torch.autograd.backward()."""

is_any_autocast_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether autocast is on for any device. Without it: yes, which costs a context manager a backward."""

FunctionBase: type = torch._C._FunctionBase
"""The class of the nodes of custom Functions, whose gradient edges need an owner. Without it: edges by
torch.autograd.graph.get_gradient_edge() for all nodes, which takes twice the time."""

AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The class of the nodes at a graph's leaves. Without it: a node that has a `variable`."""

SavedTensor: Any = torch._C._autograd.SavedTensor
"""The class of what nodes have saved. That it says whether hooks packed a tensor (`unpack_hook`, later than 2.6), or
that nothing was saved (`data`), is looked at; without, hooks are taken to be there, and I does the whole backward."""

count_nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""How many nodes of graphs this thread has made. Without it: no plan is shared by microbatches whose custom Functions
make nodes in their backward."""

unsafe_view: Any = torch.ops.aten._unsafe_view.default
"""A tensor on the same memory that to autograd is no view. Without it: a Function that returns its input's detach()."""

# TorchDispatchMode sees every operation and may compute something else. Without it: no pypipe.split().

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""As a class's __torch_function__: operations are not looked at above autograd. Without it: no pypipe.split()."""


def wrapper_tensor(kind: type, like: Tensor, device: torch.device) -> Any:
    """A tensor of a class of its own, without memory, that says it is on a device. Without it: no pypipe.split()."""
    return Tensor._make_wrapper_subclass(
        kind,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        layout=like.layout,
        device=device,
        requires_grad=False,
    )


def storage_uses(tensor: Tensor) -> int:
    """How many tensors have the tensor's storage, and then some; compared with a count of the same kind only.

    Without it: gradients and inputs are always copied.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def storage_key(tensor: Tensor) -> int:
    """Equal for two tensors on one storage, whatever its address. Without it: the storage's data_ptr()."""
    key: int = tensor.untyped_storage()._cdata
    return key


def are_modes_active() -> bool:
    """Whether a TorchDispatchMode or a TorchFunctionMode is. Without it: yes, and tensors are not made ahead."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def without_modes() -> AbstractContextManager[Any]:
    """Turns dispatch modes off, one of which may keep tensors. Without it: nothing is turned off."""
    disabled: AbstractContextManager[Any] = _disable_current_modes()
    return disabled


def unscale(gradients: list[Tensor], found: Tensor, factor: Tensor) -> None:
    """Multiplies gradients by a factor, and makes `found` 1 where one of them is not finite.

    They are of one dtype and on one device, as `found` and `factor` are. Without it: operation by operation.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, factor)


def default_store() -> Any:
    """The store through which init_process_group() brought the ranks together. Without it: a store of pypipe's own."""
    return dist.distributed_c10d._get_default_store()


OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Of an optimizer: its hooks around step(), which a copy of it must not call."""

ATTRIBUTES = {
    # Of tensors, nodes and operations.
    "_schema": "of an operation: its name and which arguments it changes",
    "_version": "of a tensor: how often it was changed in place",
    "_use_count": "of a tensor: C++ references to it",
    "_ragged_idx": "of a jagged NestedTensor: which dimension is ragged",
    "_maybe_min_seqlen": "of a jagged NestedTensor: its shortest row, if that is known",
    "_maybe_max_seqlen": "of a jagged NestedTensor: what it is padded to, if that is known",
    "_indices": "of a sparse tensor that is not coalesced",
    "_values": "of a sparse tensor that is not coalesced",
    "_input_metadata": "of a node: shapes and dtypes of the gradients that it takes",
    "_post_accumulate_grad_hooks": "of a tensor: hooks that are deferred to the end of a step",
    "_is_param": "of a tensor: whether it passes for a Parameter",
    "_parameters": "of a module: its own parameters by name",
    "_buffers": "of a module: its own buffers by name",
    "_modules": "of a module: its children by name",
    "_fields": "of GradientEdge, which from 2.7 on has an ownership_token",
    # Of DistributedDataParallel and of replicate(); where Reducer has no _autograd_hook, DDP in a stage is refused.
    "_autograd_hook": "of the reducer: says that a parameter's gradient is there",
    "_delay_all_reduce": "of the reducer: the first reduction of a static graph",
    "_rebuild_buckets": "of the reducer: makes buckets in the order of the first backward",
    "_static_graph_delay_allreduce_enqueued": "of DDP: whether that first reduction is on its way",
    "_check_sync_bufs_pre_fwd": "of DDP: whether a forward begins with a broadcast of buffers",
    "_sync_buffers": "of DDP: that broadcast",
    "_get_ddp_logging_data": "of DDP: how many parameters the reducer has",
    "_ddp": "of replicate()'s state: its DDP",
    "_init_args": "of replicate()'s state: whether that is still to be made",
    "_init_kwargs": "of replicate()'s state: whether that is still to be made",
    # Of fully_shard.
    "_get_fsdp_state": "of a module: its state",
    "_fsdp_param_group": "of a state: its parameters; in newer releases several groups",
    "_lazy_init": "of a state: what the first forward does",
    "_root_post_backward_final_callback": "of a state: reduces",
    "_state_ctx": "of a state: what all of one root share",
    "_training_state": "of a state and of a group, reset after a failure before 2.13, which has reset_iter_state()",
    "_unsharded_param": "of a parameter: the gathered one",
}
"""Private attributes of torch's objects, and what they are."""
