"""Running autograd's engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["run_backward"]

# torch.autograd.backward() spends more time on checking its arguments in Python than a small stage's backward takes;
# the engine checks shapes and dtypes itself. Others that know their roots call it as well, so it is unlikely to go.
_engine: Any = torch.autograd.Variable._execution_engine


def run_backward(roots: list[Any], gradients: list[Tensor]) -> None:
    """Backward from tensors or gradient edges; gradients add up in the leaves' `.grad`."""
    device = gradients[0].device.type
    arguments = (tuple(roots), tuple(gradients), False, False, ())  # no retain_graph, no create_graph, all leaves
    if torch.is_autocast_enabled(device):
        # As for loss.backward() after the autocast region: each operation runs in the dtype of its forward.
        with torch.autocast(device, enabled=False):
            _engine.run_backward(*arguments, allow_unreachable=True, accumulate_grad=True)
    else:
        _engine.run_backward(*arguments, allow_unreachable=True, accumulate_grad=True)
