"""Simulation: when each action of a program would run, given what each takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from pypipe.program.actions import Action
from pypipe.program.memory import peak_memory
from pypipe.program.programs import Program
from pypipe.program.simulation.clocks import run, timed_lists
from pypipe.program.simulation.costs import Cost, costs_of
from pypipe.program.verification.positions import find_positions


class Event(NamedTuple):
    """One action's place in time; `start` and `end` are in the unit of the costs."""

    action: Action
    start: float
    end: float


class Events(Sequence[Event]):
    """One rank's events, made when they are looked at: a big program has millions."""

    def __init__(self, actions: Sequence[Action], starts: Sequence[float], ends: Sequence[float]) -> None:
        self._actions, self._starts, self._ends = actions, starts, ends

    def __len__(self) -> int:
        return len(self._actions)

    def __iter__(self) -> Iterator[Event]:
        return map(Event, self._actions, self._starts, self._ends)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Event, ...]: ...
    def __getitem__(self, index: int | slice) -> Event | tuple[Event, ...]:
        if isinstance(index, slice):
            return tuple(Events(self._actions[index], self._starts[index], self._ends[index]))
        return Event(self._actions[index], self._starts[index], self._ends[index])

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each action of a program but its transfers runs; time 0 is the start of the step.

    Args:
        program: the program that was simulated.
        ranks: for each rank, its events in order.
        exposed_transfer: for each rank, the part of its idle time in which what it waited for was made already
            and on its way: transfers that no compute hid. Empty where that is not known.
    """

    program: Program
    ranks: tuple[Sequence[Event], ...]
    exposed_transfer: tuple[float, ...] = ()

    @property
    def step_time(self) -> float:
        """The time from 0 to the end of the last action of all."""
        return max((events[-1].end for events in self.ranks if events), default=0.0)

    @property
    def span(self) -> float:
        """The longest time that one rank takes from its first start to its last end.

        It leaves out the time that the pipeline takes to reach a rank, as overlapping steps would. It is the
        "cost" of the zero-bubble paper (arXiv 2401.10241, table 5), whose bubble rate is 1 - work / span.
        """
        return max((events[-1].end - events[0].start for events in self.ranks if events), default=0.0)

    @property
    def work(self) -> tuple[float, ...]:
        """For each rank, the time for which it computes, gathers parameters or reduces gradients."""
        return tuple(sum(event.end - event.start for event in events) for events in self.ranks)

    @property
    def idle(self) -> tuple[float, ...]:
        """For each rank, the part of the step time in which it does nothing: its bubble."""
        step_time = self.step_time
        return tuple(step_time - work for work in self.work)

    @property
    def bubble_ratio(self) -> float:
        """All ranks' idle time over ranks x step time; 0 for a step that takes no time."""
        whole = len(self.ranks) * self.step_time
        return sum(self.idle) / whole if whole else 0.0

    @property
    def bubble_ratio_by_span(self) -> float:
        """1 - work / span, with the ranks' mean work: the zero-bubble paper's rate; 0 for a step without time."""
        whole = len(self.ranks) * self.span
        return 1 - sum(self.work) / whole if whole else 0.0

    def peak_memory(self, activation: float | Sequence[float] = 1) -> tuple[float, ...]:
        """For each rank, the most that its live activations take; see `pypipe.program.peak_memory`.

        Args:
            activation: what one microbatch's activations take, in any unit: one number, or one for each stage.
        """
        return peak_memory(self.program, activation)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank, the most pairs of stage and microbatch alive at once, as the verifier counts them."""
        return tuple(int(peak) for peak in peak_memory(self.program))


def simulate(
    program: Program,
    *,
    forward: Cost = 1.0,
    backward: Cost | None = None,
    input_backward: Cost | None = None,
    weight_backward: Cost | None = None,
    hop: Cost = 0.0,
    message_bytes: Cost = 0.0,
    bandwidth: Cost = math.inf,
    busy_links: bool = False,
    unshard: Cost = 0.0,
    reshard: Cost = 0.0,
    reduce_grad: Cost = 0.0,
) -> Timeline:
    """Run a program in simulated time.

    Each rank runs its list in order, each action as soon as the rank is free and what it needs has come. A
    result reaches a stage on another rank after the hop's latency and its bytes over the bandwidth, while the
    ranks go on computing; slots and blocking sends are not simulated, and transfers in the lists are skipped.

    Args:
        program: with or without transfers.
        forward: time of an F, in any unit: one number, or one for each stage.
        backward: time of a B; by default I and W together, or 2 where these are not both given.
        input_backward: time of an I; by default B less W, or half of B.
        weight_backward: time of a W; by default B less I, or half of B.
        hop: latency of a transfer between ranks, in the same unit: one number, or one for each stage. The entry
            of a stage is that of the boundary between it and the stage after it, in either direction; the last
            stage's is not used. So for the next two.
        message_bytes: size of one message.
        bandwidth: bytes that a link carries in one unit of time.
        busy_links: whether a link carries one message at a time, so that the next one waits until the bytes of
            the last have left.
        unshard, reshard, reduce_grad: time of an UNSHARD, RESHARD or REDUCE_GRAD, in the unit of `forward`.

    Raises:
        ProgramError: the program is incomplete, or its ranks wait for each other for ever.
        ConfigurationError: a time that is negative or not finite, or a sequence with another length than the number
            of stages.
    """
    find_positions(program)
    costs = costs_of(
        program,
        forward=forward,
        backward=backward,
        input_backward=input_backward,
        weight_backward=weight_backward,
        hop=hop,
        message_bytes=message_bytes,
        bandwidth=bandwidth,
        unshard=unshard,
        reshard=reshard,
        reduce_grad=reduce_grad,
    )
    times = run(program, costs, busy_links)
    events = map(Events, timed_lists(program), times.starts, times.ends)
    return Timeline(program, tuple(events), times.exposed)
