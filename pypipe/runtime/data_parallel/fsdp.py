"""fully_shard (FSDP2) in a stage: gathered once and reduced once a step.

Its parameter groups gather before each forward and backward, and reduce in a callback at the end of an engine run. Here
they keep what is gathered between microbatches, and add up gradients unsharded. At REDUCE_GRAD their callback runs once
more, with the user's settings: it reduces all that has been added up, also what the weights' half of a backward has
added after the engine run of the other half had ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

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
        self._is_reduced = False

    def identity(self) -> int:
        """See Wrapper."""
        return id(self._state)

    def problem(self) -> str | None:
        """None: all of it works."""
        return None

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
        self._training = training
        self._is_reduced = False
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
        for module in self._modules():
            module.unshard()

    def after_backward(self) -> None:
        """Adds gradients in the reduction's dtype, where that is another than the parameters'.

        The callback has done so for what the engine run that queued it has made. The weights' half runs later.
        """
        if any(group.mp_policy.reduce_dtype is not None for group, _ in self._settings or ()):
            self._state._root_post_backward_final_callback()

    def reduce(self) -> None:
        """See Wrapper."""
        assert self._settings is not None
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
