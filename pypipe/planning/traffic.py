"""Traffic: the bytes that cross the cuts of a model, from the shape of what crosses them."""

from __future__ import annotations

import math
from dataclasses import dataclass

DTYPES = {
    "float64": 8,
    "float32": 4,
    "tf32": 4,
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp16": 2,
    "half": 2,
    "float8": 1,
    "fp8": 1,
}
"""Names of dtypes, and the bytes of one element."""


@dataclass(frozen=True)
class Traffic:
    """What crosses a cut: one vector of the model's width for each token.

    Args:
        batch: sequences of a step.
        sequence: tokens of a sequence.
        hidden: the model's width.
        dtype: a name of DTYPES.
        bandwidth: GB/s (10^9 bytes) of a link, or None: transfers take their latency alone.
    """

    batch: int
    sequence: int
    hidden: int
    dtype: str = "bf16"
    bandwidth: float | None = None

    @property
    def cut_bytes(self) -> int:
        """Bytes over one cut in one direction in a step."""
        return self.batch * self.sequence * self.hidden * DTYPES[self.dtype]

    def step_bytes(self, n_cuts: int) -> int:
        """Bytes over all cuts, forward and back, in a step."""
        return 2 * n_cuts * self.cut_bytes

    def per_unit(self, unit: str | None) -> float:
        """Bytes that a link carries in one unit of time; infinitely many without a bandwidth."""
        if self.bandwidth is None or unit is None:
            return math.inf
        return self.bandwidth * 1e9 * UNITS[unit]


UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
"""Units of time, in seconds."""
