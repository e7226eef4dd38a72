"""What the search is given, as flat lists of numbers; and how programs become lists of numbers and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pypipe.program.actions import Action, Kind
from pypipe.program.programs import Chain, Program
from pypipe.program.simulation.costs import Costs

KINDS = (Kind.F, Kind.I, Kind.W)
"""The kinds of a program's actions here: the one with index k, of stage s and microbatch m, is number
(k * S + s) * M + m. A full backward is an I and its W."""

Lists = list[list[int]]
"""For each rank, the numbers of its actions in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """Stages, costs and memory.

    Args:
        n_microbatches: M.
        placement: for each stage, its rank.
        chains: as in Program.
        before: for each stage, the stage before it in its chain, or -1.
        after: for each stage, the stage after it in its chain, or -1.
        durations: for F, I and W, the time of one action of each stage.
        delays: for each stage, the time from the end of its F to the arrival of its output at the stage after it, and
            of a gradient on its way back.
        activation: for each stage, what the activations of one microbatch take.
        memory: for each rank, the most that its live activations may take.
        stages_on: for each rank, its stages.
        reserving: for each stage, the other stages of its rank that have to keep room for one microbatch: the later
            ones of its chain, without which its own microbatches could never go, and all of other chains.
    """

    n_microbatches: int
    placement: tuple[int, ...]
    chains: tuple[Chain, ...]
    before: list[int]
    after: list[int]
    durations: tuple[list[float], list[float], list[float]]
    delays: list[float]
    activation: list[float]
    memory: list[float]
    stages_on: list[list[int]]
    reserving: list[list[int]]

    @property
    def n_ranks(self) -> int:
        """P."""
        return len(self.stages_on)

    @property
    def n_stages(self) -> int:
        """S."""
        return len(self.placement)

    def microbatches_of(self, stage: int) -> range:
        """List the microbatches that pass through a stage."""
        return next(chain.microbatches for chain in self.chains if stage in chain.stages)

    def work(self, rank: int) -> float:
        """Add up the time for which a rank computes."""
        return sum(
            len(self.microbatches_of(stage)) * sum(durations[stage] for durations in self.durations)
            for stage in self.stages_on[rank]
        )

    def shortest(self) -> tuple[float, float]:
        """Bound step time and span from below, whatever the order of actions.

        A rank cannot start before a forward has reached it. From then on it needs the time of all that it computes;
        and that of its F and I, after which the last gradient still has to travel to the chain's first stage, and
        the W there to run. The rank that has the first stage starts at once, so its span is no shorter than that.
        """
        forward, input_half, weight_half = self.durations
        first, last = [math.inf] * self.n_ranks, [math.inf] * self.n_ranks
        halves = [0.0] * self.n_ranks
        for chain in self.chains:
            there = back = 0.0
            for stage in chain.stages if chain.microbatches else ():
                rank = self.placement[stage]
                first[rank] = min(first[rank], there)
                last[rank] = min(last[rank], back + weight_half[chain.stages[0]])
                halves[rank] += len(chain.microbatches) * (forward[stage] + input_half[stage])
                there += forward[stage] + self.delays[stage]
                back += input_half[stage] + self.delays[stage]
        ranks = [rank for rank in range(self.n_ranks) if first[rank] < math.inf]
        round_trip = max(first[rank] + halves[rank] + last[rank] for rank in ranks)
        longest = max(first[rank] + self.work(rank) for rank in ranks)
        span = max(self.work(rank) for rank in ranks)
        return max(longest, round_trip), max(span, round_trip if len(self.chains) == 1 else 0.0)

    def program(self, name: str, lists: Lists) -> Program:
        """Make the program that runs actions in the order of their numbers.

        An I with its W right behind it, on a stage that sends no gradient, becomes a full backward: no rank waits
        for the first half alone.
        """
        size = self.n_stages * self.n_microbatches
        ranks = []
        for numbers in lists:
            actions: list[Action] = []
            for number in numbers:
                kind, place = divmod(number, size)
                stage, microbatch = divmod(place, self.n_microbatches)
                last = actions[-1] if actions else None
                if kind == 2 and self.before[stage] < 0 and last == Action(stage, Kind.I, microbatch):
                    actions[-1] = Action(stage, Kind.B, microbatch)
                else:
                    actions.append(Action(stage, KINDS[kind], microbatch))
            ranks.append(tuple(actions))
        return Program(name, self.n_microbatches, self.placement, tuple(ranks), self.chains)

    def lists(self, program: Program) -> Lists:
        """Number a program's compute actions; the program has this setting's stages."""
        size = self.n_stages * self.n_microbatches
        lists = []
        for actions in program.ranks:
            numbers: list[int] = []
            for action in actions:
                place = action.stage * self.n_microbatches + action.microbatch
                if action.kind is Kind.B:
                    numbers += (size + place, 2 * size + place)
                elif action.kind.is_compute:
                    numbers.append(KINDS.index(action.kind) * size + place)
            lists.append(numbers)
        return lists


def make_setting(program: Program, costs: Costs, activation: Sequence[float], memory: Sequence[float]) -> Setting:
    """Make the setting of a program's stages.

    Args:
        program: only its placement, chains and numbers are looked at.
        costs: of its stages.
        activation: for each stage, what one microbatch's activations take.
        memory: for each rank, the most that they may take.
    """
    stages = range(program.n_stages)
    before = [program.previous_stage(stage) for stage in stages]
    after = [program.next_stage(stage) for stage in stages]
    on = [[stage for stage in stages if program.placement[stage] == rank] for rank in range(program.n_ranks)]
    reserving = []
    for stage in stages:
        chain = program.chain_of(stage)
        others = on[program.placement[stage]]
        reserving.append([other for other in others if other > stage or other not in chain.stages])
        if stage in reserving[-1]:
            reserving[-1].remove(stage)
    return Setting(
        n_microbatches=program.n_microbatches,
        placement=program.placement,
        chains=program.chains,
        before=[-1 if stage is None else stage for stage in before],
        after=[-1 if stage is None else stage for stage in after],
        durations=(costs.compute[Kind.F], costs.compute[Kind.I], costs.compute[Kind.W]),
        delays=[costs.latency[stage] + costs.occupancy[stage] for stage in stages],
        activation=list(activation),
        memory=list(memory),
        stages_on=on,
        reserving=reserving,
    )
