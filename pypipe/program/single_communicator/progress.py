"""Progress where each pair of ranks has one communicator: its transfers run one group after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pypipe.program.messages import Messages
from pypipe.program.programs import Program
from pypipe.program.walk import Policy, walk


def check_paired_progress(program: Program, messages: Messages) -> None:
    """Prove that every rank reaches the end of its list when each pair of ranks has one communicator.

    The rules:

    - Two ranks that exchange anything have one communicator (and one stream on each), for both directions and for
      outputs and gradients alike.
    - The transfers that stand between two of a rank's compute actions with nothing but transfers between them are
      issued together, when the rank gets there. Those with the same peer form one group, in the order of the list
      (between ncclGroupStart and ncclGroupEnd); groups with different peers are on different communicators and
      do not wait for each other.
    - A communicator runs one group at a time on each rank, in the order in which that rank issued them. All
      transfers of a running group run at once. A SEND and its RECV meet when the groups of both are running. A
      group ends, and the next one runs, when all its transfers have met.
    - Nothing is buffered: a rank does not start its next compute action before its SENDs have met. RECVs block no
      compute but their own: an F, B or I that takes a message waits for the end of its RECV's group.

    So the two ranks have to issue what they exchange in one order, up to what groups allow: opposite transfers that
    both ranks put in one group may stand in either order. These groups are the largest that may be. The NCCL link,
    whose hosts also wait for announcements, forms smaller ones, of programs that list everything in one order:
    see `groups.ends_of_groups`.

    Args:
        program: lowered; each SEND has exactly one RECV, and what goes from one rank to another is sent and
            received in the same order.
        messages: its messages.

    Raises:
        ProgramError: some ranks wait for each other; the message says what each waits for.
    """
    walk(program, _Communicators(program, messages))


@dataclass(slots=True, eq=False)
class _Group:
    """The transfers of one rank with one peer that are issued together.

    Args:
        rank: the rank that issues it.
        peer: the other rank.
        unmet: how many of its transfers have not met.
        numbers: its messages.
    """

    rank: int
    peer: int
    unmet: int = 0
    numbers: list[int] = field(default_factory=list)


class _Communicators(Policy):
    """Transfers by the rules of `check_paired_progress`."""

    def __init__(self, program: Program, messages: Messages) -> None:
        super().__init__()
        self._program, self._messages = program, messages
        self._at = [0] * program.n_ranks
        self._unmet_sends = [0] * program.n_ranks
        self._running: dict[int, _Group] = {}  # the group of a message's one end, while its other end is not there
        # A compute action waits for the end of message n's group under the number n; rank r waits for its SENDs under
        # messages.count + r.
        self._met, self._ended = bytearray(messages.count), bytearray(messages.count)
        self._queues: dict[tuple[int, int], deque[_Group]] = {}

    def run(self, rank: int) -> Iterator[int]:
        """Go through the rank's list."""
        actions, bases, at, ended = self._program.ranks[rank], self._messages.bases, self._at, self._ended
        while at[rank] < len(actions):
            stage, kind, microbatch = actions[at[rank]]
            if kind.is_transfer:
                self._issue(rank)
                if self._unmet_sends[rank]:
                    yield self._messages.count + rank
                continue
            base = bases[kind][stage]
            if base >= 0 and not ended[base + microbatch]:
                yield base + microbatch
            at[rank] += 1

    def reason(self, rank: int, number: int) -> tuple[int, str]:
        """What runs on the communicator that a rank waits for."""
        actions, position = self._program.ranks[rank], self._at[rank]
        if number < self._messages.count:
            doing, peer = f"waits in {actions[position]}", self._peer(rank, number)
        else:
            position -= 1  # the last of the transfers that were issued together
            doing = "waits for a SEND"
            groups = (group for (issuer, _), queue in sorted(self._queues.items()) for group in queue if issuer == rank)
            peer = next(group.peer for group in groups if any(self._is_sent(rank, n) for n in self._unmet(group)))
        there, listed = self._at[peer], self._program.ranks[peer]
        stands = f"position {there}, {listed[there]}" if there < len(listed) else "its end"
        head = self._queues[rank, peer][0]
        own = ", ".join(
            str(self._messages.send(number) if self._is_sent(rank, number) else self._messages.receive(number))
            for number in self._unmet(head)
        )
        return position, f"{doing}; its communicator with rank {peer}, which is at {stands}, runs {own}"

    def _issue(self, rank: int) -> None:
        """Issue the transfers from the rank's position up to its next compute action, one group for each peer."""
        actions = self._program.ranks[rank]
        position = self._at[rank]
        groups: dict[int, _Group] = {}
        while position < len(actions) and actions[position].kind.is_transfer:
            stage, kind, microbatch = actions[position]
            number = self._messages.bases[kind][stage] + microbatch
            peer = self._peer(rank, number)
            groups.setdefault(peer, _Group(rank, peer)).numbers.append(number)
            self._unmet_sends[rank] += kind.is_send
            position += 1
        self._at[rank] = position
        for peer, group in groups.items():
            group.unmet = len(group.numbers)
            queue = self._queues.setdefault((rank, peer), deque())
            queue.append(group)
            if len(queue) == 1:
                self._start(group)

    def _start(self, group: _Group) -> None:
        """Let the transfers of a group run, and those that meet end their groups and start the next."""
        started = [group]
        while started:
            group = started.pop()
            for number in group.numbers:
                other = self._running.pop(number, None)
                if other is None:
                    self._running[number] = group
                    continue
                self._meet(number)
                for end in (group, other):
                    end.unmet -= 1
                    if not end.unmet:
                        started.extend(self._end(end))

    def _meet(self, number: int) -> None:
        self._met[number] = 1
        sender = self._program.placement[self._messages.channel(number).source_stage]
        self._unmet_sends[sender] -= 1
        if not self._unmet_sends[sender] and self._messages.count + sender in self.waiting:
            self.wake(self._messages.count + sender)

    def _end(self, group: _Group) -> list[_Group]:
        """End the running group of a communicator, and return the next one there, if any."""
        for number in group.numbers:
            if not self._is_sent(group.rank, number):
                self._ended[number] = 1
                if number in self.waiting:
                    self.wake(number)
        queue = self._queues[group.rank, group.peer]
        queue.popleft()
        return [queue[0]] if queue else []

    def _peer(self, rank: int, number: int) -> int:
        channel = self._messages.channel(number)
        source, target = (self._program.placement[s] for s in (channel.source_stage, channel.target_stage))
        return target if source == rank else source

    def _unmet(self, group: _Group) -> list[int]:
        return [number for number in group.numbers if not self._met[number]]

    def _is_sent(self, rank: int, number: int) -> bool:
        return self._messages.received[number // self._program.n_microbatches] != rank
