"""Recognizes cumulative offsets of packed sequences (cu_seqlens and the like), which are wrong once they are cut."""

from __future__ import annotations

import re

import torch
from torch import Tensor

__all__ = ["advice", "holds_offsets", "may_be_offsets", "names_offsets"]

_NAME = re.compile(r"(?<![a-z])cu_|cumul|cumsum|offsets|seq_?lens|indptr", re.IGNORECASE)


def names_offsets(name: str) -> bool:
    """Whether a key or a field is called as cumulative offsets are: cu_seqlens, cu_seq_lens_q, doc_offsets."""
    return _NAME.search(name) is not None


def may_be_offsets(tensor: Tensor) -> bool:
    """Whether it has one dimension and a dtype that offsets have. No look at its values."""
    return tensor.dim() == 1 and tensor.dtype in (torch.int32, torch.int64)


def holds_offsets(tensor: Tensor) -> bool:
    """Whether a tensor's values are such as cumulative offsets have: from 0 on, never less, and more in the end.

    Reads the values: on an accelerator that waits for them.
    """
    if not may_be_offsets(tensor) or tensor.numel() == 0 or tensor.is_meta:
        return False
    values = tensor.detach()
    return bool((values[0] == 0) & (values[-1] > 0) & (values[1:] >= values[:-1]).all())


def advice(what: str, tensor: Tensor, spec_argument: str) -> str:
    """The message for offsets that would be cut.

    Args:
        what: the tensor's name, and how many numbers it has.
        tensor: it.
        spec_argument: where its chunk spec goes.
    """
    first = ", ".join(str(int(value)) for value in tensor[:4])
    return (
        f"{what}: they look like cumulative offsets ({first}{', ...' if tensor.numel() > 4 else ''}), which cannot be "
        "cut, since a microbatch's offsets begin at 0 again. Give each microbatch its own: make them a tensor with one "
        f"row for each microbatch, padded to one length, with TensorChunkSpec(0) for it in {spec_argument}; or build "
        "one batch for each microbatch yourself, and call step() for each, on a schedule with n_microbatches=1. If "
        "they are no offsets, a chunk spec for them alone says how to cut them"
    )
