"""fully_shard (FSDP2) in a stage: gathered once and reduced once a step.

FSDP's parameter groups gather before each forward and backward, and reduce in a callback at the end of an engine run.
Here they stay gathered between microbatches, and add up unsharded gradients. At REDUCE_GRAD their callback runs once
more, with the user's settings. It reduces everything that has been added up, including what the weights' half of a
backward has added after the other half's engine run had ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pypipe.runtime.data_parallel.foreign_ranks import foreign_ranks
from pypipe.runtime.data_parallel.replica_failure import Reductions
from pypipe.runtime.tensor_memory import memory_parts

__all__ = ["Sharded"]


class _Settings(NamedTuple):
    """What the user has set for a parameter group."""

    reduce_grads: bool
    all_reduce_grads: bool
    reshard_after_backward: bool
    post_forward_mesh_info: Any  # None: stay gathered after a forward


class Sharded:
    """A module to which fully_shard was applied, and those below it.

    Args:
        root: the module; no module above it in the stage is sharded.
    """

    shards = True
    moves_gradients = True

    def __init__(self, root: nn.Module) -> None:
        self._root: Any = root
        self._settings: list[tuple[Any, _Settings]] | None = None  # None: between steps
        self._is_last_backward = True
        self._training = False
        self._is_gathered = False
        self._took_part = False  # in this step's reduction, even if that has failed
        self._is_reduced = False
        self._reductions: Reductions | None = None

    def identity(self) -> int:
        """See Wrapper."""
        return id(self._state)

    def problem(self, others: frozenset[int]) -> str | None:
        """See Wrapper."""
        ranks = {int(rank) for group in self._groups() for rank in group.mesh_info.mesh.mesh.flatten()}
        remedy = (
            "fully_shard(module, mesh=...), of a module made anew, since this one has parts of other stages' shards"
        )
        return foreign_ranks("fully_shard would share out the parameters of", ranks, others, remedy)

    @property
    def _state(self) -> Any:
        return self._root._get_fsdp_state()

    def _modules(self) -> Iterator[Any]:
        from torch.distributed.fsdp import FSDPModule

        return (module for module in self._root.modules() if isinstance(module, FSDPModule))

    def _groups(self) -> list[Any]:
        """The parameter groups, each once."""
        groups: dict[int, Any] = {}
        for module in self._modules():
            state = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)
            for group in (state._fsdp_param_group,) if several is None else several:
                if group is not None:
                    groups[id(group)] = group
        return list(groups.values())

    def begin(self, *, training: bool) -> None:
        """See Wrapper."""
        self._state._lazy_init()  # which sets the root to stay gathered after its forward: before that is looked at
        if self._reductions is None:
            self._reductions = Reductions(self._ranks())
        self._reductions.check_last()
        self._training = training
        self._is_gathered = self._took_part = self._is_reduced = False
        context = self._state._state_ctx
        self._is_last_backward = context.is_last_backward
        context.is_last_backward = False
        self._settings = []
        for group in self._groups():
            own = _Settings(
                group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward, group.post_forward_mesh_info
            )
            self._settings.append((group, own))
            _set(group, _Settings(False, False, False, None))

    def unshard(self) -> None:
        """See Wrapper."""
        if self._is_gathered:
            return
        for module in self._modules():
            module.unshard()
        self._is_gathered = True

    def after_backward(self) -> None:
        """Adds gradients in the reduction's dtype, where that is another than the parameters'.

        The callback has done so for what the engine run that queued it has made. The weights' half runs later.
        """
        if any(group.mp_policy.reduce_dtype is not None for group, _ in self._settings or ()):
            self._state._root_post_backward_final_callback()

    def reduce(self) -> None:
        """See Wrapper."""
        assert self._settings is not None
        assert self._reductions is not None
        key = self._reductions.begin()
        self._reduce()
        if any(own.reduce_grads for _, own in self._settings):
            self._reductions.check(key, next(self._reduced(), None))

    def forward_failed(self) -> None:
        """Nothing: what a forward needs of the replicas comes in UNSHARD."""

    def reduce_failed(self, reason: str) -> None:
        """See Wrapper."""
        if not self._training or self._took_part:
            return
        assert self._settings is not None
        assert self._reductions is not None
        self._reductions.tell(self._reductions.begin(), reason)
        parameters = [p for group, own in self._settings if own.reduce_grads for p in group.fsdp_params]
        parameters = [p for p in parameters if p.sharded_param.requires_grad]
        kept = [p.sharded_param.grad for p in parameters]
        for parameter in parameters:
            parameter.sharded_param.grad = None
            unsharded = parameter.unsharded_param
            unsharded.grad = torch.full(unsharded.shape, torch.nan, dtype=unsharded.dtype, device=unsharded.device)
        self._reduce()
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.sharded_param.grad = gradient

    def _ranks(self) -> list[int]:
        """The global ranks among which the first group's gradients are reduced."""
        mesh = self._groups()[0].mesh_info.mesh
        return [int(rank) for rank in mesh.mesh.flatten()]

    def _reduced(self) -> Iterator[Tensor]:
        """Gradients of which this rank has a part."""
        for group, own in self._settings or ():
            for parameter in group.fsdp_params if own.reduce_grads else ():
                gradient = parameter.sharded_param.grad
                if gradient is not None and any(part.numel() for part in memory_parts(gradient)):
                    yield gradient

    def _reduce(self) -> None:
        assert self._settings is not None
        self._took_part = True
        self._state._state_ctx.is_last_backward = self._is_last_backward
        for group, own in self._settings:
            _set(group, own._replace(reshard_after_backward=True))
        # Where the user has turned reduction off, gradients stay unsharded, for a later step to reduce.
        self._state._root_post_backward_final_callback()
        self._is_reduced = True

    def reshard(self) -> None:
        """See Wrapper."""
        for group in self._groups():
            group.reshard()

    def end(self) -> None:
        """See Wrapper."""
        settings, self._settings = self._settings, None
        if settings is None:
            return
        self._state._state_ctx.is_last_backward = self._is_last_backward
        for group, own in settings:
            _set(group, own)

    def abandon(self) -> str | None:
        """See Wrapper."""
        if self._settings is None:
            return None
        if hasattr(self._root, "reset_iter_state"):
            self._root.reset_iter_state()
        else:  # torch < 2.13
            _reset(self._state, self._groups())
        if not self._training or self._is_reduced:
            return None
        # Unsharded gradients would be reduced by the next step, whatever zero_grad() has done to the sharded ones.
        for group, _ in self._settings:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        return "its gradients were not reduced and have been dropped; .grad is what it was before the step"


def _set(group: Any, settings: _Settings) -> None:
    for name, value in settings._asdict().items():
        setattr(group, name, value)


def _reset(state: Any, groups: list[Any]) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    context = state._state_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    for each in context.all_states:
        each._training_state = TrainingState.IDLE
    for group in groups:
        group._training_state = TrainingState.IDLE
        group.finalize_backward()
        group.reshard()
