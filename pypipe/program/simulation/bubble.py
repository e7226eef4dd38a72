"""The bubble of a timeline, divided by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pypipe.program.actions import Action, Kind
from pypipe.program.programs import Program
from pypipe.program.simulation.clocks import run
from pypipe.program.simulation.costs import costs_of
from pypipe.program.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Bubble:
    """What the ranks' idle time consists of. Each part is a share of ranks x step time, and they add up.

    Each part is the difference between two steps of the same program, in the same order: see `split_bubble`.
    A part below 0 is possible where unequal times happen to suit the program better than equal ones.

    Args:
        warm_up_and_cool_down: what the program's dependencies cost even with equal stages and no transfers.
        imbalance: what it costs beyond that that actions of one kind take unequal times, from stage to stage
            and from microbatch to microbatch.
        exposed_transfer: what it costs beyond that that results take time to reach another rank; in a
            measured step also whatever else a rank does between its actions.
    """

    warm_up_and_cool_down: float
    imbalance: float
    exposed_transfer: float

    @property
    def ratio(self) -> float:
        """The whole bubble: the sum of the parts."""
        return self.warm_up_and_cool_down + self.imbalance + self.exposed_transfer


def split_bubble(timeline: Timeline) -> Bubble:
    """Divide the bubble of a timeline, be it simulated or measured, by cause.

    The program is run in simulated time, in its own order, twice: with each kind of action taking its mean time
    everywhere, and with each action taking the time that it took; transfers take none. The work of all three
    steps, the timeline's own included, is the same, so their idle times differ by what one cause adds.

    Args:
        timeline: of a program whose ranks do not wait for each other for ever.
    """
    whole = len(timeline.ranks) * timeline.step_time
    if not whole:
        return Bubble(0.0, 0.0, 0.0)
    actions = [[event.action for event in events] for events in timeline.ranks]
    taken = [[event.end - event.start for event in events] for events in timeline.ranks]
    by_kind: defaultdict[Kind, list[float]] = defaultdict(list)
    for rank, events in enumerate(timeline.ranks):
        for position, event in enumerate(events):
            by_kind[event.action.kind].append(taken[rank][position])
    means = {kind: sum(times) / len(times) for kind, times in by_kind.items()}
    work = sum(map(sum, taken))
    balanced = _step_time(timeline.program, actions, [[means[action.kind] for action in each] for each in actions])
    unbalanced = _step_time(timeline.program, actions, taken)
    n_ranks = len(actions)
    return Bubble(
        warm_up_and_cool_down=(n_ranks * balanced - work) / whole,
        imbalance=n_ranks * (unbalanced - balanced) / whole,
        exposed_transfer=n_ranks * (timeline.step_time - unbalanced) / whole,
    )


def _step_time(program: Program, ranks: Sequence[Sequence[Action]], times: Sequence[Sequence[float]]) -> float:
    """When the last action ends if each starts as soon as its rank is free and what it needs was made."""
    ordered = replace(program, ranks=tuple(map(tuple, ranks)))
    timed = run(ordered, costs_of(ordered), durations=times)
    return max((ends[-1] for ends in timed.ends if ends), default=0.0)
