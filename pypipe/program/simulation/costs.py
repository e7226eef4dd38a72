"""Costs: what each action and each transfer of a program takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pypipe.errors import ConfigurationError
from pypipe.program.actions import Kind
from pypipe.program.programs import Program

Cost = float | Sequence[float]
"""One number for all stages, or one for each stage."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What the actions and transfers of a program take, by stage; all times in one unit.

    Args:
        compute: for each kind but the transfers, the time of one action of each stage.
        latency: for each stage, the time from a message's leaving the link's sender to its arrival at the next
            stage, or of a gradient on its way back; 0 where the next stage is on the same rank.
        occupancy: for each stage, the time for which such a message occupies its link: bytes over bandwidth.
    """

    compute: dict[Kind, list[float]]
    latency: list[float]
    occupancy: list[float]


def costs_of(
    program: Program,
    *,
    forward: Cost = 1.0,
    backward: Cost | None = None,
    input_backward: Cost | None = None,
    weight_backward: Cost | None = None,
    hop: Cost = 0.0,
    message_bytes: Cost = 0.0,
    bandwidth: Cost = math.inf,
    unshard: Cost = 0.0,
    reshard: Cost = 0.0,
    reduce_grad: Cost = 0.0,
) -> Costs:
    """Check costs, and spread them over a program's stages.

    Args:
        program: its stages and their places.
        forward: time of an F, in any unit.
        backward: time of a B; by default I and W together, or 2 where these are not both given.
        input_backward: time of an I; by default B less W, or half of B.
        weight_backward: time of a W; by default B less I, or half of B.
        hop: latency of one transfer between ranks. The entry of a stage is that of the boundary between it and
            the stage after it, in either direction; the last stage's is not used. So for the next two.
        message_bytes: size of one message.
        bandwidth: bytes that a link carries in one unit of time.
        unshard, reshard, reduce_grad: times of an UNSHARD, a RESHARD and a REDUCE_GRAD.

    Raises:
        ConfigurationError: a time that is negative or not finite, or a sequence with another length than the
            number of stages; the message names it.
    """
    n_stages = program.n_stages
    given_input = None if input_backward is None else _by_stage(n_stages, "input_backward", input_backward)
    given_weight = None if weight_backward is None else _by_stage(n_stages, "weight_backward", weight_backward)
    if backward is None and given_input is not None and given_weight is not None:
        full = [half + other for half, other in zip(given_input, given_weight, strict=True)]
    else:
        full = _by_stage(n_stages, "backward", 2.0 if backward is None else backward)
    if given_input is None:
        given_input = _rest("backward less weight_backward", full, given_weight)
    if given_weight is None:
        given_weight = _rest("backward less input_backward", full, given_input)
    latency = _by_stage(n_stages, "hop", hop)
    sizes = _by_stage(n_stages, "message_bytes", message_bytes)
    bandwidths = list(bandwidth) if isinstance(bandwidth, Sequence) else [bandwidth] * n_stages
    _require_length("bandwidth", len(bandwidths), n_stages)
    for stage, value in enumerate(bandwidths):
        if not value > 0:
            raise ConfigurationError(f"bandwidth of stage {stage} is {value}: give more than 0")
    occupancy = [size / rate for size, rate in zip(sizes, bandwidths, strict=True)]
    for stage in range(n_stages):
        after = program.next_stage(stage)
        if after is None or program.placement[after] == program.placement[stage]:
            latency[stage] = occupancy[stage] = 0.0
    return Costs(
        {
            Kind.F: _by_stage(n_stages, "forward", forward),
            Kind.B: full,
            Kind.I: given_input,
            Kind.W: given_weight,
            Kind.UNSHARD: _by_stage(n_stages, "unshard", unshard),
            Kind.RESHARD: _by_stage(n_stages, "reshard", reshard),
            Kind.REDUCE_GRAD: _by_stage(n_stages, "reduce_grad", reduce_grad),
        },
        latency,
        occupancy,
    )


def _by_stage(n_stages: int, name: str, cost: Cost) -> list[float]:
    costs = list(cost) if isinstance(cost, Sequence) else [cost] * n_stages
    _require_length(name, len(costs), n_stages)
    for stage, value in enumerate(costs):
        where = f"{name} of stage {stage}" if isinstance(cost, Sequence) else name
        if value < 0:
            raise ConfigurationError(f"{where} is {value}: it cannot be negative")
        if not math.isfinite(value):
            raise ConfigurationError(f"{where} is {value}: give a finite number")
    return costs


def _require_length(name: str, length: int, n_stages: int) -> None:
    if length != n_stages:
        raise ConfigurationError(f"{name} has {length} entries for {n_stages} stages: give one number, or one a stage")


def _rest(name: str, full: list[float], part: list[float] | None) -> list[float]:
    """Compute what a full backward takes beyond one of its halves; half of it where neither is known."""
    if part is None:
        return [whole / 2 for whole in full]
    rest = [whole - given for whole, given in zip(full, part, strict=True)]
    return _by_stage(len(rest), name, rest)
