"""The norm of the gradients of all stages, as torch.nn.utils.clip_grad_norm_ has it of one module's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pypipe.errors import InputError, NonFiniteError
from pypipe.program import Program
from pypipe.runtime.step.tied_parameters import Ties

__all__ = ["Gather", "clip", "listed"]

Values = list[float | str]
Gather = Callable[[str, Callable[[], Values]], list[Values]]


def _of_first_copy(program: Program, rank: int, parameters: Mapping[int, Iterable[nn.Parameter]]) -> set[int]:
    """The ids of those parameters of this rank that count, where the pipeline may hold two copies of the model.

    A parameter that two stages of the rank share counts where the first copy of the first of their pieces is.

    Args:
        program: what runs.
        rank: this rank.
        parameters: those of each of its stages.
    """
    counted: set[int] = set()
    seen: set[int] = set()
    for copies in sorted(zip(*(chain.stages for chain in program.chains), strict=True)):
        for stage in copies:
            if program.placement[stage] == rank:
                new = {id(parameter) for parameter in parameters[stage]} - seen
                seen |= new
                if stage == copies[0]:
                    counted |= new
    return counted


def listed(
    program: Program,
    rank: int,
    modules: Mapping[int, Sequence[nn.Module]],
    ties: Ties | None,
    others: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of a rank, each once, and those of them that count in the norm.

    Args:
        program: what runs.
        rank: this rank.
        modules: those whose parameters each of its stages trains.
        ties: where parameters of several stages are one weight.
        others: parameters of this rank that are in none of its stages.
    """
    of_stages = {stage: [p for module in each for p in module.parameters()] for stage, each in modules.items()}
    counted = _of_first_copy(program, rank, of_stages)
    if ties is not None:
        counted = (counted - ties.parameters) | ties.counted
    known = {id(p) for parameters in of_stages.values() for p in parameters}
    counted |= {id(p) for p in others} - known
    parameters = list({id(p): p for p in (*(p for each in of_stages.values() for p in each), *others)}.values())
    return parameters, [p for p in parameters if id(p) in counted]


@torch.no_grad()
def clip(
    parameters: Sequence[Tensor],
    counted: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    foreach: bool | None,
    gather: Gather,
    device: torch.device,
) -> Tensor:
    """Scales this rank's gradients by the norm of all ranks' gradients.

    Args:
        parameters: all of this rank's, each once.
        counted: those of them that count in the norm.
        max_norm, norm_type, error_if_nonfinite, foreach: as torch.nn.utils.clip_grad_norm_ has them.
        gather: brings every rank's values, by rank.
        device: where the norm is to be, on a rank without gradients too.

    Returns:
        The norm, before clipping: one element, the same on every rank.

    Raises:
        NonFiniteError: on every rank: it is not finite, and `error_if_nonfinite`.
        InputError: another norm_type, or a sparse gradient.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise InputError(f"norm_type is {norm_type:g}: give a number above 0, or math.inf")

    def mine() -> Values:
        found: Values = []
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
            raise InputError(
                "clip_grad_norm_() takes no sparse gradients, as torch's does not: leave sparse=True out of the "
                "embedding"
            )
        for group in _alike(counted).values():
            gradients = [gradient for _, gradient in group]
            found += [str(gradients[0].dtype).removeprefix("torch."), _norm(gradients, norm_type, foreach)]
        return found

    call = f"clip_grad_norm_({max_norm:g}, norm_type={norm_type:g})"
    found = [value for values in gather(call, mine) for value in values]
    total = _combined([float(value) for value in found[1::2]], norm_type)
    dtype = None
    for name in map(str, found[::2]):
        one: torch.dtype = getattr(torch, name)
        dtype = one if dtype is None else torch.promote_types(dtype, one)
    whole = torch.tensor(total, dtype=dtype or torch.float32, device=device)
    if error_if_nonfinite and not math.isfinite(total):
        raise NonFiniteError(
            f"the total norm of order {norm_type:g} of the gradients of all stages is {total}, so they cannot be "
            "clipped: pass error_if_nonfinite=False to scale them by it all the same"
        )
    for group in _alike(parameters).values():
        torch.nn.utils.clip_grads_with_norm_([parameter for parameter, _ in group], max_norm, whole, foreach)
    return whole


def _alike(parameters: Iterable[Tensor]) -> dict[Any, list[tuple[Tensor, Tensor]]]:
    """Parameters and gradients, in groups that torch's functions take: one dtype, and one mesh and placements."""
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            key = gradient.dtype, getattr(gradient, "device_mesh", None), getattr(gradient, "placements", None)
            groups.setdefault(key, []).append((parameter, gradient))
    return groups


def _norm(gradients: Sequence[Tensor], norm_type: float, foreach: bool | None) -> float:
    """The norm of gradients that are alike; of DTensors, that of the whole ones, the same on all ranks of their mesh.

    DTensor's own reduction fails where a rank has a shard without elements.
    """
    first: Any = gradients[0]
    mesh = getattr(first, "device_mesh", None)
    if mesh is None:
        parts = list(gradients)
    elif any(placement.is_partial() for placement in first.placements):
        return _norm([cast(Any, gradient).full_tensor() for gradient in gradients], norm_type, foreach)
    else:
        parts = [cast(Any, gradient).to_local() for gradient in gradients]
    parts = [part for part in parts if part.numel()]
    norm = float(torch.nn.utils.get_total_norm(parts, norm_type, foreach=foreach))
    if mesh is None:
        return norm
    is_largest = math.isinf(norm_type)
    total = torch.tensor(norm, dtype=torch.float64, device=first.device)
    if not is_largest:
        total = total**norm_type
    for dimension, placement in enumerate(first.placements):
        if placement.is_shard():
            dist.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, mesh.get_group(dimension))
    return float(total) if is_largest else float(total) ** (1 / norm_type)


def _combined(norms: Sequence[float], norm_type: float) -> float:
    """The norm of parts with these norms; in Python, so that it is the same on every kind of machine."""
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    largest = max(norms, default=0.0)
    if math.isinf(norm_type) or largest == 0 or math.isinf(largest):
        return largest
    total: float = math.fsum((norm / largest) ** norm_type for norm in norms) ** (1 / norm_type)
    return largest * total
