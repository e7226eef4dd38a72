"""Tensors on the host in what a stage on a GPU returns, such as lengths: they travel with the layout, as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pypipe.errors import LayoutError

__all__ = ["MOST_BYTES", "HostTensor", "with_host_tensors"]

MOST_BYTES = 16384
"""Of one tensor. A layout with other values is another layout, which is announced before its message."""


class HostTensor(NamedTuple):
    """A tensor's values, as plain data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    values: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> HostTensor:
        """The values of a tensor on the CPU."""
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        return cls(tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes())

    def tensor(self) -> Tensor:
        """A new tensor with these values."""
        flat = torch.frombuffer(bytearray(self.values), dtype=torch.uint8) if self.values else torch.empty(0).byte()
        return flat.view(self.dtype).reshape(self.shape)


def with_host_tensors(tree: Any, device: torch.device, path: Sequence[Any] = ()) -> Any:
    """The tree of a stage on `device`, with a HostTensor for each tensor on the CPU.

    Args:
        tree: what the stage returned.
        device: where the stage runs.
        path: where the tree stands in what the stage returned.

    Raises:
        LayoutError: a tensor is on another device, or too large or of the wrong kind to travel as values.
    """
    if isinstance(tree, Tensor):
        if tree.device == device:
            return tree
        where = f"output{''.join(f'[{part!r}]' for part in path)}"
        if tree.device.type != "cpu":
            raise LayoutError(
                f"this stage runs on {device}, but {where} is on {tree.device}: give PipelineStage the device that the "
                f"module really uses, or return .to({str(device)!r})"
            )
        size = tree.numel() * tree.element_size()
        if tree.requires_grad or size > MOST_BYTES:
            what = "requires gradients" if tree.requires_grad else f"has {size} bytes, more than {MOST_BYTES}"
            raise LayoutError(
                f"this stage runs on {device}, but {where} is on the CPU and {what}: return .to({str(device)!r})"
            )
        return HostTensor.of(tree)
    if type(tree) is dict:
        return {key: with_host_tensors(value, device, (*path, key)) for key, value in tree.items()}
    if type(tree) in (tuple, list) and len(path) < 64:  # what is nested deeper is refused where it is described
        return type(tree)(with_host_tensors(item, device, (*path, i)) for i, item in enumerate(tree))
    return tree
