"""The request: ranks, microbatches, times and memory to plan for, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pypipe.errors import ConfigurationError
from pypipe.planning.traffic import DTYPES, UNITS, Traffic


class PlanError(ConfigurationError):
    """A request that cannot be planned; the message is one line that says what to give instead."""


@dataclass(frozen=True)
class Request:
    """What schedules are compared for.

    Times and activations are those of one rank's whole share of the model for one microbatch: a P-th of the model. A
    stage of a schedule with v stages a rank takes a v-th of it. One number holds for all; P numbers, in the order
    of the model's layers, for models that are not cut evenly.

    Args:
        n_ranks: P.
        n_microbatches: M.
        forward: T_F, in any unit.
        input_backward: T_B, of the backward's input-gradient half.
        weight_backward: T_W, of its weight-gradient half; a full backward takes both.
        hop: latency of one transfer from rank to rank.
        stages_per_rank: v of the schedules that have several stages a rank and let one choose how many; None is 2.
        memory: the most that a rank may keep alive, in activations of one microbatch on one rank (A), or in GB where
            `activation` says what these take; None means no limit.
        activation: GB of one microbatch's activations on one rank, or None; P numbers as for the times.
        unit: "us", "ms" or "s", or None where it is not known.
        traffic: what crosses the cuts, or None where it is not known.

    Raises:
        PlanError: a number is out of range.
    """

    n_ranks: int
    n_microbatches: int
    forward: Sequence[float] = (1.0,)
    input_backward: Sequence[float] = (1.0,)
    weight_backward: Sequence[float] = (1.0,)
    hop: float = 0.0
    stages_per_rank: int | None = None
    memory: float | None = None
    activation: Sequence[float] | None = None
    unit: str | None = None
    traffic: Traffic | None = field(default=None)

    def __post_init__(self) -> None:
        for option, count, what in (
            ("-p", self.n_ranks, "the number of ranks"),
            ("-m", self.n_microbatches, "the number of microbatches"),
            ("-v", self.stages_per_rank, "the number of stages on each rank"),
        ):
            if count is not None and count < 1:
                raise PlanError(f"{option} is {count}: give {what}, 1 or more")
        for option, times in (
            ("--tf", self.forward),
            ("--tb", self.input_backward),
            ("--tw", self.weight_backward),
            ("--tc", (self.hop,)),
        ):
            if len(times) not in (1, self.n_ranks):
                raise PlanError(
                    f"{option} has {len(times)} times for {self.n_ranks} ranks: give one number, or one for each rank"
                )
            for time in times:
                if not 0 <= time < math.inf:
                    raise PlanError(f"{option} is {time:g}: give a time from 0 on")
        for size in self.activation or ():
            if not 0 < size < math.inf:
                raise PlanError(f"--activation is {size:g}: give GB above 0")
        if self.activation is not None and len(self.activation) not in (1, self.n_ranks):
            raise PlanError(
                f"--activation has {len(self.activation)} sizes for {self.n_ranks} ranks: give one, or one a rank"
            )
        if not any((*self.forward, *self.input_backward, *self.weight_backward)):
            raise PlanError("--tf, --tb and --tw are all 0: give the time of one of them at least")
        if self.memory is not None and not 0 < self.memory < math.inf:
            raise PlanError(
                f"--memory is {self.memory:g}: give {'GB' if self.activation else 'a number of activations'} above 0"
            )
        if self.unit is not None and self.unit not in UNITS:
            raise PlanError(f"--unit is {self.unit!r}: give one of {', '.join(UNITS)}")
        if self.traffic is not None:
            _check_traffic(self.traffic, self.unit)

    @property
    def work(self) -> float:
        """The mean time for which a rank computes in a step."""
        per_microbatch = sum(
            sum(times) / len(times) for times in (self.forward, self.input_backward, self.weight_backward)
        )
        return self.n_microbatches * per_microbatch

    def amount(self, memory: float) -> str:
        """Format an amount of memory with its unit."""
        return f"{memory:.3g} GB" if self.activation else f"{memory:.4g} A"

    @property
    def message_bytes(self) -> float:
        """Bytes of one microbatch over one cut; 0 where they are not known."""
        return self.traffic.cut_bytes / self.n_microbatches if self.traffic else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes that a link carries in one unit of time."""
        return self.traffic.per_unit(self.unit) if self.traffic else math.inf


def _check_traffic(traffic: Traffic, unit: str | None) -> None:
    for option, count in (("--batch", traffic.batch), ("--sequence", traffic.sequence), ("--hidden", traffic.hidden)):
        if count < 1:
            raise PlanError(f"{option} is {count}: give 1 or more")
    if traffic.dtype not in DTYPES:
        raise PlanError(f"--dtype is {traffic.dtype!r}: give one of {', '.join(DTYPES)}")
    if traffic.bandwidth is not None:
        if not 0 < traffic.bandwidth < math.inf:
            raise PlanError(f"--bandwidth is {traffic.bandwidth:g}: give the GB/s of a link, above 0")
        if unit is None:
            raise PlanError("--bandwidth is in GB/s: give the unit of the times too, such as --unit us")
