"""Checks for runs whose numbers are wrong, which cost time: `check="nan"` and `check="checksum"` of a schedule."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pypipe.errors import CorruptionError, NonFiniteError
from pypipe.runtime.torch_private import pytree

__all__ = ["CHECKS", "checksums", "compare_checksums", "require_finite", "wanted"]

CHECKS = ("nan", "checksum")
"""What `check=` may name."""


def wanted(check: str | Iterable[str] | None) -> frozenset[str]:
    """Returns the checks that are asked for. Raises ValueError for an unknown one."""
    names = frozenset() if check is None else frozenset([check] if isinstance(check, str) else check)
    unknown = sorted(str(name) for name in names - set(CHECKS))
    if unknown:
        raise ValueError(f"check={unknown[0]!r}: it takes {' and '.join(map(repr, CHECKS))}, one of them or a list")
    return names


def require_finite(tree: Any, what: str) -> None:
    """Raises NonFiniteError where a floating-point tensor of `tree` has a NaN or an infinity.

    While gradients are on, tensors that need none are passed over: a mask may well hold -inf.
    """
    training = torch.is_grad_enabled()
    for path, tensor in pytree.tree_leaves_with_path(tree) if not isinstance(tree, Tensor) else [((), tree)]:
        if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        if tensor.layout != torch.strided or (training and not tensor.requires_grad and tensor is not tree):
            continue
        finite = torch.isfinite(tensor.detach())
        if not bool(finite.all()):
            nans, bad = int(torch.isnan(tensor.detach()).sum()), int((~finite).sum())
            raise NonFiniteError(
                f"{what}{pytree.keystr(path)} has {nans} NaN and {bad - nans} infinite values of {tensor.numel()}. "
                "Everything that came to this action from other stages was finite: look here"
            )


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """A CRC-32 of each tensor's bytes, as they lie in memory; of dense tensors on a CPU."""
    sums = []
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        dense = size > 0 and tensor.is_cpu  # what lies elsewhere is refused by the link
        memory = (ctypes.c_char * size).from_address(tensor.data_ptr()) if dense else b""
        sums.append(zlib.crc32(memory))
    return sums


def compare_checksums(tensors: Sequence[Tensor], expected: Sequence[int], action: str) -> None:
    """Raises CorruptionError unless the tensors have these checksums."""
    for number, (found, sent) in enumerate(zip(checksums(tensors), expected, strict=True)):
        if found != sent:
            raise CorruptionError(
                f"tensor {number} of {action} changed on its way: sent with the checksum {sent:08x}, it came with "
                f"{found:08x}. Suspect the memory, the network or a stage that writes where it must not"
            )
