"""Turns one rank's list of actions into calls: all that can be decided before a step is decided here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pypipe.program import Action, Channel, Kind, Link, Program, channel_of
from pypipe.program.groups import ends_of_groups
from pypipe.runtime.diagnostics.recorder import code_of
from pypipe.runtime.step.stage_execution import StageExecution

__all__ = ["Call", "plan_calls"]


class Call(NamedTuple):
    """One call: the action that it is a part of, as the recorder writes it, and the function with its argument."""

    code: int
    function: Callable[[int], None]
    microbatch: int


def plan_calls(
    program: Program, rank: int, stages: Mapping[int, StageExecution], issue: Callable[[], None] | None
) -> tuple[list[Action], list[Call]]:
    """The calls of one rank in one step.

    Args:
        program: lowered and verified.
        rank: whose list it is.
        stages: the stages that it holds, by their number in the program.
        issue: to be called after each group of transfers, where they are held back until then.

    Returns:
        The calls, and for each of them the action that it is a part of.
    """
    planned: list[Action] = []
    calls: list[Call] = []

    def add(action: Action, function: Callable[[int], None], microbatch: int) -> None:
        planned.append(action)
        calls.append(Call(code_of(action), function, microbatch))

    order = _LinkOrder(program, rank)
    actions = program.ranks[rank]
    ends = [False] * len(actions) if issue is None else ends_of_groups(program, rank)
    for action, ends_group in zip(actions, ends, strict=True):
        stage, kind, microbatch = stages[action.stage], action.kind, action.microbatch
        if kind.is_receive:
            channel = stage.receiver(Kind.F if kind is Kind.RECV_F else Kind.B)
            if channel.posts:  # else it waits only for the return of the slot to the sender
                add(action, channel.post, microbatch)
        else:
            for early, earlier in order.before(action):
                add(action, stages[early.target_stage].receiver(early.kind).take, earlier)
            if kind is Kind.SEND_B and planned and planned[-1] == action._replace(kind=Kind.B):
                # Nothing is called between the two, such as a post that needs a slot which B has given back.
                calls[-1] = calls[-1]._replace(function=stage.backward_before_send)
            add(action, _function_of(action, stage), microbatch)
        if ends_group and issue is not None:
            add(action, _ignoring_microbatch(issue), microbatch)
    return planned, calls


class _LinkOrder:
    """What a rank's links carry, in order, while its list is walked.

    A link is a FIFO. Where it carries several channels, or a program uses messages in another order than they come in,
    whatever comes before the message that is to be used has to be taken off the link first.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self._program = program
        self._coming: dict[Link, deque[tuple[Channel, int]]] = {}
        self._taken: set[tuple[Channel, int]] = set()
        for action in program.ranks[rank]:
            if action.kind.is_receive:
                channel = channel_of(action)
                self._coming.setdefault(program.link_of(channel), deque()).append((channel, action.microbatch))

    def before(self, action: Action) -> list[tuple[Channel, int]]:
        """The messages to take off the link before the one that this F, B or I uses."""
        program, stage = self._program, action.stage
        if action.kind is Kind.F:
            kind, source = Kind.F, program.previous_stage(stage)
        elif action.kind in (Kind.B, Kind.I):
            kind, source = Kind.B, program.next_stage(stage)
        else:
            return []
        if source is None or program.placement[source] == program.placement[stage]:
            return []
        message = (Channel(kind, source, stage), action.microbatch)
        if message in self._taken:
            self._taken.remove(message)
            return []
        coming = self._coming[program.link_of(message[0])]
        early = []
        while (next_one := coming.popleft()) != message:
            early.append(next_one)
        self._taken.update(early)
        return early


def _ignoring_microbatch(call: Callable[[], None]) -> Callable[[int], None]:
    return lambda microbatch: call()


def _function_of(action: Action, stage: StageExecution) -> Callable[[int], None]:
    match action.kind:
        case Kind.F:
            return stage.forward
        case Kind.B:
            return stage.backward
        case Kind.I:
            return stage.input_backward
        case Kind.W:
            return stage.weight_backward
        case Kind.SEND_F:
            return stage.send_forward
        case Kind.SEND_B:
            return stage.send_backward
        case Kind.UNSHARD:
            return stage.unshard
        case Kind.REDUCE_GRAD:
            return stage.reduce_gradients
        case Kind.RESHARD:
            return stage.reshard
    raise ValueError(f"the executor cannot run {action}")
