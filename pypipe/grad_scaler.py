"""torch.amp.GradScaler for a pipeline: one scale, and one decision about each optimizer's step, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pypipe.base_schedule import Schedule, pipeline_of
from pypipe.errors import ConfigurationError, PipelineError
from pypipe.runtime.torch_private import unscale

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """Scales the gradients of a schedule's steps, and skips an optimizer's step on every rank if any rank overflowed.

    A `torch.amp.GradScaler`, with three differences. The schedule itself multiplies the gradient that each backward
    starts from by the scale, so `loss_fn` returns its loss as it is, losses come back unscaled, and `scale()` is not
    called. Where a gradient of any stage is infinite or NaN, `step()` skips the optimizer's step on every rank. A rank
    without parameters passes None for its optimizer.

    Every rank makes one with the same arguments, and calls `unscale_()`, `step()` and `update()` equally often, in the
    same order. Several steps of the schedule may come before them, to add up gradients. A loss that does not go through
    `loss_fn` is multiplied by `get_scale()` by hand.

    Args:
        schedule: whose gradients are scaled; or several schedules over the same ranks, such as one for each model.
        device: type of the device where the scale is. Default: that of the schedule's stages.
        init_scale, growth_factor, backoff_factor, growth_interval: as `torch.amp.GradScaler` has them.
        enabled: False: nothing is scaled, and `step()` calls the optimizer's, as for bfloat16.

    Raises:
        ConfigurationError: a schedule has a scaler, or runs over other ranks than the first.
    """

    def __init__(
        self,
        schedule: Schedule | Sequence[Schedule],
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        schedules = list(schedule) if isinstance(schedule, Sequence) else [schedule]
        if not schedules or not all(isinstance(each, Schedule) for each in schedules):
            raise ConfigurationError("GradScaler takes a schedule, or a list of schedules")
        self._pipelines = [pipeline_of(each) for each in schedules]
        first = self._pipelines[0]
        kind = torch.device(device).type if device is not None else first.device.type
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._turn = 0  # optimizers that were looked at since the last update()
        self._none = _NoOptimizer()
        if not enabled:
            return
        if not hasattr(torch.amp.GradScaler, "_unscale_grads_"):
            raise ConfigurationError(f"torch {torch.__version__} unscales in another way: use a release from 2.6 on")
        names = {pipeline.world.name for pipeline in self._pipelines}
        if len(names) > 1:
            raise ConfigurationError("GradScaler got schedules over different ranks: give each of them one of its own")
        super().scale(torch.zeros((), device=first.device if first.device.type == kind else kind))  # makes the scale
        for pipeline in self._pipelines:
            pipeline.scale_by(self)

    def scale(self, outputs: Any) -> Any:
        """Refuses: the schedule scales. With enabled=False, returns what it is given.

        Raises:
            PipelineError: always, else.
        """
        if not self.is_enabled():
            return outputs
        raise PipelineError(
            "pypipe.GradScaler: the schedule scales what loss_fn returns: leave scale() out, and return the loss as it "
            "is. Multiply a loss that does not go through loss_fn by get_scale()"
        )

    def unscale_(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Divides the gradients of this rank's optimizer by the scale, and looks whether any rank has overflowed.

        Args:
            optimizer: None on a rank that has none.

        Raises:
            RuntimeError: it was called already since the last update().
            ConfigurationError: the ranks have different scales.
            PipelineError: another rank failed, has left, or makes another call.
        """
        super().unscale_(self._given(optimizer))

    def step(self, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """Has the optimizer step, unless any rank has overflowed; unscales before, where that was not done.

        Args:
            optimizer: None on a rank that has none.
            args, kwargs: what its step() is called with.

        Returns:
            What the optimizer returns; None where its step is skipped.
        """
        return super().step(self._given(optimizer), *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Lowers the scale where a step was skipped, and raises it after growth_interval steps without one.

        Args:
            new_scale: the scale to use instead, the same on every rank.
        """
        super().update(new_scale)
        self._turn = 0

    def _given(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        return cast(torch.optim.Optimizer, self._none) if optimizer is None else optimizer

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Where torch unscales and looks for infinities: what it finds is that of all ranks."""
        self._turn += 1
        settings = [
            self.get_scale(), self.get_growth_factor(), self.get_backoff_factor(), float(self.get_growth_interval())
        ]  # fmt: skip

        def values() -> list[float | str]:
            return [self._find(optimizer, inv_scale, found_inf, allow_fp16), *settings]

        found = self._pipelines[0].gather(f"GradScaler.unscale_() of optimizer {self._turn} since update()", values)
        if any(theirs != settings for _, *theirs in found):
            listed = "; ".join(
                f"rank {rank}: scale {scale:g}, growth_factor {growth:g}, backoff_factor {backoff:g}, growth_interval "
                f"{interval:g}"
                for rank, (_, scale, growth, backoff, interval) in enumerate(found)
            )
            raise ConfigurationError(
                f"the ranks' scalers differ ({listed}): build them with the same arguments, and load the same "
                "state_dict() on every rank. Gradients were scaled by the last stage's: call zero_grad()"
            )
        found_inf.fill_(max(float(overflowed) for overflowed, *_ in found))
        return {found_inf.device: found_inf}

    def _find(self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> float:
        """Unscales this rank's gradients; returns 1.0 if one of them, or of the ranks of their meshes, is not finite.

        torch's own way looks at the first DTensor's mesh and placements alone.
        """
        parameters: list[Any] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        plain = [parameter for parameter in parameters if not hasattr(parameter, "device_mesh")]
        one: Any = SimpleNamespace(param_groups=[{"params": plain}])
        found = [*super()._unscale_grads_(one, inv_scale, found_inf, allow_fp16).values()]
        distributed = [parameter for parameter in parameters if hasattr(parameter, "device_mesh")]
        parts: dict[torch.dtype, list[Tensor]] = {}
        for parameter in distributed:
            if parameter.grad is not None:
                part = parameter.grad.to_local()
                parts.setdefault(part.dtype, []).append(part)
        if torch.float16 in parts and not allow_fp16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        for alike in parts.values():
            here = torch.zeros_like(found_inf, device=alike[0].device)
            unscale(alike, here, inv_scale.to(alike[0].device))
            found.append(here)
        total = torch.zeros((), dtype=torch.float32, device=distributed[0].device if distributed else found_inf.device)
        for each in found:
            total = torch.maximum(total, each.to(total.device))
        for mesh in dict.fromkeys(parameter.device_mesh for parameter in distributed):
            for dimension in range(mesh.ndim):
                dist.all_reduce(total, dist.ReduceOp.MAX, mesh.get_group(dimension))
        return float(total)


class _NoOptimizer:
    """Stands for the optimizer of a rank that has none."""

    param_groups: Sequence[Any] = ()

    def step(self) -> None:
        pass
