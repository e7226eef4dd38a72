"""Lowering: the pass that puts a program's transfers into its lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .actions import Action, Kind
from .lifetimes import ChannelSlots, Message, RankSlots
from .positions import Positions, find_positions
from .programs import Channel, Link, Program

_RECEIVE = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}


def lower(program: Program) -> Program:
    """Insert the transfers into a program.

    A RECV posts a receive into a free slot and blocks nothing; the F, B or I that uses the message waits for
    it, and the last action that needs it gives the slot back. Each RECV stands at the earliest place where
    its channel has a free slot, in the order in which the link's sender sends. A SEND follows its producer,
    but after the RECVs that the slots released by the producer allow: a rank posts what it can before it does
    what may block, which is what keeps two neighbours in 1F1B from waiting in a send to each other. Stages on
    one rank hand over in memory, so no transfer stands between them.

    Args:
        program: compute actions only.

    Returns:
        The same program with transfers. Time is linear in the number of actions.

    Raises:
        ProgramError: the compute actions are incomplete, or out of order within a rank.
        ValueError: the program has transfers already; `program.compute_only()` is without them.
    """
    for actions in program.ranks:
        for action in actions:
            if not action.kind.is_compute:
                raise ValueError(
                    f"{program.name} has transfers already, such as {action}: verify it as it is, or lower "
                    "its compute_only()"
                )
    positions = find_positions(program)
    sends, messages = _plan_sends(program)
    incoming: list[list[list[Message]]] = [[] for _ in program.ranks]
    for link in sorted(messages):
        incoming[link.target_rank].append(messages[link])
    lists = [_lower_rank(program, positions, rank, incoming[rank], sends[rank]) for rank in range(program.n_ranks)]
    return replace(program, ranks=tuple(lists))


def _plan_sends(program: Program) -> tuple[list[dict[int, Action]], dict[Link, list[Message]]]:
    """For each rank the SENDs by their producers' positions; for each link its messages in sending order."""
    messages: dict[Link, list[Message]] = {}
    outputs = [_route(program, messages, Kind.F, s, program.next_stage(s)) for s in range(program.n_stages)]
    gradients = [_route(program, messages, Kind.B, s, program.previous_stage(s)) for s in range(program.n_stages)]
    sends: list[dict[int, Action]] = []
    for actions in program.ranks:
        following: dict[int, Action] = {}
        for position, action in enumerate(actions):
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            if kind is Kind.W:
                continue
            route = outputs[stage] if kind is Kind.F else gradients[stage]
            if route is not None:
                channel, queue = route
                queue.append((channel, microbatch))
                following[position] = Action(stage, Kind.SEND_F if kind is Kind.F else Kind.SEND_B, microbatch)
        sends.append(following)
    return sends, messages


def _route(
    program: Program, messages: dict[Link, list[Message]], kind: Kind, source: int, target: int | None
) -> tuple[Channel, list[Message]] | None:
    """The channel from a stage to its neighbour, and its link's list of messages; None within a rank."""
    if target is None or program.placement[target] == program.placement[source]:
        return None
    channel = Channel(kind, source, target)
    return channel, messages.setdefault(program.link_of(channel), [])


def _lower_rank(
    program: Program,
    positions: Positions,
    rank: int,
    incoming: Sequence[Sequence[Message]],
    sends: Mapping[int, Action],
) -> tuple[Action, ...]:
    slots = RankSlots(program, positions, incoming)
    queues = [_PostingQueue(messages, slots.channels) for messages in incoming]
    queue_of_slots = {queue_slots: queue for queue in queues for queue_slots in queue.slots}
    lowered: list[Action] = []
    for queue in queues:
        queue.post(lowered)
    for position, action in enumerate(program.ranks[rank]):
        lowered.append(action)
        for released in slots.release(action):
            queue_of_slots[released].post(lowered)
        send = sends.get(position)
        if send is not None:
            lowered.append(send)
    return tuple(lowered)


class _PostingQueue:
    """The receives of one link that are still to be posted: a FIFO, so its head holds up the rest."""

    def __init__(self, messages: Sequence[Message], slots: Mapping[Channel, ChannelSlots]) -> None:
        self.slots = [slots[channel] for channel, _ in messages]
        self._messages = messages
        self._head = 0

    def post(self, lowered: list[Action]) -> None:
        """Append a RECV for each message that has a slot now, and take that slot."""
        while self._head < len(self._messages):
            slots = self.slots[self._head]
            if slots.taken == slots.needed:
                return
            slots.taken += 1
            channel, microbatch = self._messages[self._head]
            self._head += 1
            lowered.append(Action(channel.target_stage, _RECEIVE[channel.kind], microbatch))
