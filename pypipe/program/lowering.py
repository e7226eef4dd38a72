"""Lowering: the pass that puts a program's transfers into its lists."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from pypipe.errors import ConfigurationError
from pypipe.program.actions import Action, Kind
from pypipe.program.data_parallel import put_back
from pypipe.program.exchanges import order_exchanges
from pypipe.program.messages import Messages
from pypipe.program.programs import Link, Program
from pypipe.program.verification.lifetimes import fewest_slots
from pypipe.program.verification.positions import find_positions
from pypipe.program.walk import Policy, walk

_SEND = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}
# Hundreds of thousands of actions are made here, and this is the quickest way to make a named tuple.
_action = partial(tuple.__new__, Action)


def lower(program: Program, *, synchronous: bool = False) -> Program:
    """Insert the transfers into a program.

    A RECV posts a receive into a free slot and blocks nothing; the F, B or I that uses the message waits for
    it, and the last action that needs it gives the slot back. Each RECV stands at the earliest place where
    its channel has a free slot, in the order in which the link's sender sends. A SEND follows its producer,
    but after the RECVs that the slots released by the producer allow: a rank posts what it can before it does
    what may block, which is what keeps two neighbours in 1F1B from waiting in a send to each other. Stages on
    one rank hand over in memory, so no transfer stands between them.

    A channel has as many slots as messages of it are ever in use at once. Where that would leave ranks waiting in
    sends to each other (looped BFS with more microbatches than ranks), one of the channels that they wait for gets
    one slot more, until all ranks reach their ends.

    On GPUs a RECV that is posted early would hold up what comes after it, wherever a host waits for its device. There
    transfers are synchronous: every rank reaches its end even if each transfer blocks both of its ranks until it is
    over. All ranks list what they exchange in one order, as `exchanges.order_exchanges` says, and slots follow from it.

    Args:
        program: without transfers.
        synchronous: whether a transfer may block both of its ranks until it is over, as on GPUs.

    Returns:
        The same program with transfers. The time taken is linear in the number of actions.

    Raises:
        ProgramError: the compute actions are incomplete, or out of order within a rank, or no number of slots
            brings all ranks to their ends.
        ConfigurationError: the program has transfers already; `program.without_transfers()` is without them.
    """
    for actions in program.ranks:
        for action in actions:
            if action.kind.is_transfer:
                raise ConfigurationError(
                    f"{program.name} has transfers already, such as {action}: verify it as it is, or lower "
                    "its without_transfers()"
                )
    original, program = program, program.compute_only()
    positions = find_positions(program)
    messages = Messages(program)
    if synchronous:
        return put_back(replace(program, ranks=tuple(map(tuple, order_exchanges(program, messages)))), original)
    links = _order_of_links(program, messages)
    slots = fewest_slots(program, messages, positions, links.values())
    releasing = (Kind.F,) if positions.is_forward_only else (Kind.B, Kind.W)
    with _collector_paused():
        lowering = _Lowering(program, messages, links, slots, releasing)
        walk(program, lowering)
        if lowering.has_granted:
            # With its slots from the start, every rank gets at least as far as it did before.
            lowering = _Lowering(program, messages, links, lowering.slots, releasing)
            walk(program, lowering)
        return put_back(replace(program, ranks=tuple(map(tuple, lowering.lists))), original)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from scanning the new actions again and again, which form no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _order_of_links(program: Program, messages: Messages) -> dict[Link, list[int]]:
    """List, for each link, its messages in the order in which their producers stand in the sender's list."""
    links: dict[Link, list[int]] = {}
    queues: dict[int, list[int]] = {}  # of each base
    for bases in (messages.sent[Kind.F], messages.sent[Kind.B]):
        for base in bases:
            if base >= 0:
                queues[base] = links.setdefault(program.link_of(messages.channel(base)), [])
    append = {base: queue.append for base, queue in queues.items()}
    for actions in program.ranks:
        for stage, kind, microbatch in actions:
            base = messages.sent[kind][stage]
            if base >= 0:
                append[base](base + microbatch)
    return {link: links[link] for link in sorted(links)}


class _Lowering(Policy):
    """A run of the program, in which every SEND waits for its RECV; the lists are written as it goes.

    Args:
        program: compute actions only.
        messages: its messages.
        links: their order on each link.
        slots: how many slots each channel has, by `number // M`; copied.
        releasing: the kinds after which a message's slot is free.

    Attributes:
        lists: the ranks' lists, with transfers.
        slots: as given, and more where ranks would have waited for each other.
        has_granted: whether any channel got more slots than given.
    """

    def __init__(
        self,
        program: Program,
        messages: Messages,
        links: dict[Link, list[int]],
        slots: Sequence[int],
        releasing: Sequence[Kind],
    ) -> None:
        super().__init__()
        self.slots = list(slots)
        self.has_granted = False
        self.lists: list[list[Action]] = [[] for _ in program.ranks]
        self._program, self._messages, self._releasing = program, messages, releasing
        self._taken = [0] * len(self.slots)
        # A rank waits for the arrival of message n under the number n, for its RECV under messages.count + n.
        self._posted, self._arrived = bytearray(messages.count), bytearray(messages.count)
        self._at = [0] * program.n_ranks
        self._queues = list(links.values())
        self._heads = [0] * len(self._queues)
        n_stages = program.n_stages
        self._queue_of_channel: dict[int, int] = {}
        self._freed_by: list[list[tuple[int, int]]] = [[] for _ in range(n_stages)]  # by stage: channel and queue
        self._receivers: dict[int, tuple[int, Kind, list[Action]]] = {}
        for queue, numbers in enumerate(self._queues):
            for channel in sorted({number // program.n_microbatches for number in numbers}):
                stage, kind = (channel, Kind.RECV_F) if channel < n_stages else (channel - n_stages, Kind.RECV_B)
                self._queue_of_channel[channel] = queue
                self._freed_by[stage].append((channel, queue))
                self._receivers[channel] = stage, kind, self.lists[program.placement[stage]]
        for queue in range(len(self._queues)):
            self._post(queue)

    def run(self, rank: int) -> Iterator[int]:
        """Write the rank's list; wait for messages, and for the RECVs of what it sends."""
        arrived, posted, waiting, count = self._arrived, self._posted, self.waiting, self._messages.count
        bases, sent, releasing, freed_by = self._messages.bases, self._messages.sent, self._releasing, self._freed_by
        taken, queues, heads, lowered = self._taken, self._queues, self._heads, self.lists[rank]
        for position, action in enumerate(self._program.ranks[rank]):
            stage, kind, microbatch = action
            base = bases[kind][stage]
            if base >= 0 and not arrived[base + microbatch]:
                self._at[rank] = position
                yield base + microbatch
            lowered.append(action)
            if kind in releasing:
                for channel, queue in freed_by[stage]:
                    taken[channel] -= 1
                    if heads[queue] < len(queues[queue]):
                        self._post(queue)
            base = sent[kind][stage]
            if base >= 0:
                number = base + microbatch
                if not posted[number]:
                    self._at[rank] = position
                    yield count + number
                lowered.append(_action((stage, _SEND[kind], microbatch)))
                arrived[number] = 1
                if number in waiting:
                    self.wake(number)

    def relieve(self) -> None:
        """Give one slot more to the channel that the lowest rank waits to send on."""
        count = self._messages.count
        blocked = [(rank, number - count) for number, rank in self.waiting.items() if number >= count]
        if blocked:
            # All earlier messages of its link are sent, so the one that it waits for is next to be posted.
            channel = min(blocked)[1] // self._program.n_microbatches
            self.slots[channel] += 1
            self.has_granted = True
            self._post(self._queue_of_channel[channel])

    def reason(self, rank: int, number: int) -> tuple[int, str]:
        """Say which message a rank waits for; no rank is left waiting for a RECV, since `relieve` grants slots."""
        return self._at[rank], self._messages.reason(number, self._at)

    def _post(self, queue: int) -> None:
        """Append a RECV for each message at the head of a link's queue that has a slot now."""
        n_microbatches, count = self._program.n_microbatches, self._messages.count
        numbers, slots, taken, head = self._queues[queue], self.slots, self._taken, self._heads[queue]
        while head < len(numbers):
            number = numbers[head]
            channel = number // n_microbatches
            if taken[channel] == slots[channel]:
                break
            taken[channel] += 1
            head += 1
            stage, kind, lowered = self._receivers[channel]
            lowered.append(_action((stage, kind, number % n_microbatches)))
            self._posted[number] = 1
            if count + number in self.waiting:
                self.wake(count + number)
        self._heads[queue] = head
