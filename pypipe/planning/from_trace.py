"""What a measured step says to `pypipe plan`: the times of its actions, as the command's options."""

from __future__ import annotations

import math

from pypipe.program import Kind, Timeline

__all__ = ["plan_command", "plan_options"]


def plan_options(timeline: Timeline) -> dict[str, str]:
    """Turn a timeline into options of `pypipe plan`.

    Where backwards are not split, their halves are not known: each gets half of the whole.

    Args:
        timeline: of a whole program, in microseconds.

    Returns:
        `--ranks`, `--microbatches`, `--tf`, `--tb`, `--tw` and `--unit`, each with its text. The times are those of P
        equal parts of the model, in the order of its layers, for one microbatch.
    """
    program = timeline.program
    means = _mean_times(timeline)
    whole = means[Kind.B]
    halves = {
        kind: [half or full / 2 for half, full in zip(means[kind], whole, strict=True)] for kind in (Kind.I, Kind.W)
    }
    times = {"--tf": means[Kind.F], "--tb": halves[Kind.I], "--tw": halves[Kind.W]}
    chain = program.chains[0].stages
    per_rank = max(1, len(chain) // program.n_ranks)
    options = {"--ranks": str(program.n_ranks), "--microbatches": str(program.n_microbatches)}
    for option, of_stages in times.items():
        in_order = [of_stages[stage] for stage in chain]
        parts = [math.fsum(in_order[first : first + per_rank]) for first in range(0, len(in_order), per_rank)]
        options[option] = ",".join(f"{part:.3g}" if part < 1000 else f"{part:.0f}" for part in parts)
    return options | {"--unit": "us"}


def plan_command(timeline: Timeline) -> str:
    """Write the `pypipe plan` command that a measured step suggests."""
    return " ".join(["pypipe plan", *(f"{option} {text}" for option, text in plan_options(timeline).items())])


def _mean_times(timeline: Timeline) -> dict[Kind, list[float]]:
    """For each kind of compute action, the mean time of each stage's; 0 where it has none."""
    times: dict[Kind, list[list[float]]] = {
        kind: [[] for _ in range(timeline.program.n_stages)] for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
    }
    for events in timeline.ranks:
        for action, start, end in events:
            if action.kind in times:
                times[action.kind][action.stage].append(end - start)
    return {kind: [math.fsum(each) / len(each) if each else 0.0 for each in stages] for kind, stages in times.items()}
