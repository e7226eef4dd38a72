"""What a dry run has to know of an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pypipe.runtime.torch_private import pytree

__all__ = ["is_only_made_like", "is_random", "reads_values", "written_tensors"]


def is_only_made_like(func: Any) -> bool:
    """Whether an operation makes a tensor of another one's shape, whatever that one's values."""
    name: str = func._schema.name.partition("::")[2]
    return name.startswith(("new_", "empty_like", "full_like", "ones_like", "zeros_like"))


def written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Those that an operation changes in place."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def reads_values(func: Any, given: Sequence[Tensor]) -> bool:
    """Whether an operation's result, or its shape, depends on values of its tensors."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func._schema.name == "aten::index":
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:])
    return True


def is_random(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":  # of attention
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return True
