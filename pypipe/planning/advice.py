"""Advice: what a plan's figures suggest, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from pypipe.planning.comparison import Comparison
from pypipe.planning.request import Request

_ENOUGH = 4  # microbatches for each rank, as a rule of thumb; twice as many is better still


def advise(comparison: Comparison) -> list[str]:
    """Write advice on a comparison; each sentence only where it applies."""
    request = comparison.request
    advice = [*_on_memory(comparison), *_on_microbatches(request), *_on_batch(request), *_on_balance(request)]
    best = comparison.best
    if best is not None and best.step_time:
        share = max(best.exposed_transfer, default=0.0) / best.step_time
        if share > 0.05:
            advice.append(f"Under {best.name} a rank waits for messages on their way for {share:.0%} of the step.")
    return advice


def _on_memory(comparison: Comparison) -> list[str]:
    request, memory = comparison.request, comparison.request.memory
    if memory is None or comparison.best is not None or not comparison.rows:
        return []
    least = min(comparison.rows, key=lambda row: max(row.peak_memory))
    return [
        f"No schedule fits into a memory of {request.amount(memory)}: {least.name} needs the least, "
        f"{request.amount(max(least.peak_memory))}. Cut the batch into smaller microbatches, or recompute activations."
    ]


def _on_microbatches(request: Request) -> list[str]:
    ranks, count = request.n_ranks, request.n_microbatches
    if ranks == 1 or count >= _ENOUGH * ranks:
        return []

    def ratio(microbatches: int) -> str:
        return f"{(ranks - 1) / (microbatches + ranks - 1):.1%}"

    enough = _ENOUGH * ranks
    return [
        f"M = {count} is less than 4P = {enough}: the bubble of GPipe and 1F1B, (P-1)/(M+P-1), is {ratio(count)} here, "
        f"{ratio(enough)} with M = {enough} and {ratio(2 * enough)} with M = 8P = {2 * enough}."
    ]


def _on_batch(request: Request) -> list[str]:
    count, traffic = request.n_microbatches, request.traffic
    if count == 1:
        return []
    if traffic is not None and traffic.batch < count:
        return [
            f"A batch of {traffic.batch} sequences cannot be cut into {count} microbatches: give -m {traffic.batch} or "
            f"less, or --batch {count} or more."
        ]
    size = "M x the microbatch"
    if traffic is not None:
        size += f", here {count} x {traffic.batch / count:g} = {traffic.batch} sequences"
    return [
        f"The gradients of all {count} microbatches add up: the effective batch is {size}. "
        "Choose the learning rate for that, not for one microbatch."
    ]


def _on_balance(request: Request) -> list[str]:
    totals = [
        _at(request.forward, piece) + _at(request.input_backward, piece) + _at(request.weight_backward, piece)
        for piece in range(request.n_ranks)
    ]
    slowest, mean = max(totals), sum(totals) / len(totals)
    if slowest <= 1.05 * mean:
        return []
    return [
        f"Piece {totals.index(slowest)} of the model takes {slowest / mean - 1:.0%} more than the mean, and the others "
        "wait for it: cut the model by measured times, with fewer layers there."
    ]


def _at(times: Sequence[float], piece: int) -> float:
    return times[0] if len(times) == 1 else times[piece]
