"""One weight in several stages."""

from __future__ import annotations

from torch import Tensor
from torch.nn.parameter import is_lazy

from pypipe.errors import ConfigurationError
from pypipe.runtime.step.tied_parameters import TIE

__all__ = ["tie"]


def tie(parameter: Tensor, key: str) -> None:
    """Declares that a parameter is the same weight as every other one with this key, in whichever stage of the model.

    Such as the embedding in the first stage and the head in the last one. Each of the stages has a parameter of its
    own, with the same values. At the end of a step their gradients are added up, and each gets the sum, with the same
    bits, so equal optimizers keep them equal. `schedule.clip_grad_norm_()` counts them once. Where stages are on one
    rank they may share the parameter itself as well.

    Call it on every rank for the parameters of its own stages, before the first step, once they are what the optimizer
    gets: after `deepcopy`, `to_empty`, `fully_shard` and whatever else makes new parameters. Shape, dtype,
    `requires_grad`, placements and values are compared when the ranks meet, which raises ConfigurationError on every
    rank where they differ, or where only one parameter has the key.

    Args:
        parameter: of a stage, or of a loss_fn that is an nn.Module.
        key: any text.

    Raises:
        ConfigurationError: it is no parameter, or it has another key.
    """
    if not isinstance(parameter, Tensor) or not parameter.is_leaf:
        what = "a tensor that was computed" if isinstance(parameter, Tensor) else f"a {type(parameter).__name__}"
        raise ConfigurationError(f"tie() takes a parameter of a stage, not {what}")
    if is_lazy(parameter):
        raise ConfigurationError("tie() takes a parameter that has values: run the lazy module's first forward before")
    if not isinstance(key, str) or not key:
        raise ConfigurationError(f"tie() takes a text as the key, not {key!r}")
    earlier = getattr(parameter, TIE, key)
    if earlier != key:
        raise ConfigurationError(f"this parameter is tied as {earlier!r} already, and cannot be tied as {key!r} too")
    setattr(parameter, TIE, key)
