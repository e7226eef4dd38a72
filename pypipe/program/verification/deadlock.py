"""The deadlock check runs a lowered program in thought, with nothing buffered, to its end."""

from __future__ import annotations

from collections.abc import Iterator

from pypipe.program.messages import Messages
from pypipe.program.programs import Program
from pypipe.program.walk import Policy, walk


def check_progress(program: Program, messages: Messages, *, synchronous: bool) -> None:
    """Prove that every rank reaches the end of its list when each transfer is a rendezvous.

    A SEND blocks its rank until its RECV has been posted; F, B and I block until their message is there; a W never
    blocks. A RECV blocks nothing, unless transfers are synchronous: then it blocks its rank until its SEND is there,
    so that a transfer is over for both ranks before either goes on. The order in which ranks take turns makes no
    difference to how far each gets, so one run is a proof.

    The synchronous rules are those of a GPU on its worst day. A transfer there is a kernel at either end, which holds
    its place on the device until the other end runs too; and a host may wait at any time, in code that is not
    pypipe's, for all that it has queued (a device-wide synchronization, in which the allocator frees memory or a
    kernel is loaded). Whatever a host waits for then, of what it has listed so far, is over by these rules before it
    goes on.

    Args:
        program: lowered; each SEND has exactly one RECV.
        messages: its messages.
        synchronous: whether a RECV blocks its rank too.

    Raises:
        ProgramError: some ranks wait for each other; the message says what each waits for.
    """
    walk(program, _Rendezvous(program, messages, synchronous))


class _Rendezvous(Policy):
    """Transfers by the rules of `check_progress`."""

    def __init__(self, program: Program, messages: Messages, synchronous: bool) -> None:
        super().__init__()
        self._program, self._messages, self._synchronous = program, messages, synchronous
        # A rank waits for the arrival of message n under the number n, for its RECV under messages.count + n.
        self._posted, self._arrived = bytearray(messages.count), bytearray(messages.count)
        self._at = [0] * program.n_ranks

    def run(self, rank: int) -> Iterator[int]:
        """Go through the rank's list."""
        posted, arrived, waiting, synchronous = self._posted, self._arrived, self.waiting, self._synchronous
        bases, count = self._messages.bases, self._messages.count
        for position, (stage, kind, microbatch) in enumerate(self._program.ranks[rank]):
            base = bases[kind][stage]
            if base < 0:
                continue
            message = base + microbatch
            if kind.is_receive:
                posted[message] = 1
                if count + message in waiting:
                    self.wake(count + message)
                if not synchronous:
                    continue
            elif kind.is_send:
                if not posted[message]:
                    self._at[rank] = position
                    yield count + message
                arrived[message] = 1
                if message in waiting:
                    self.wake(message)
                continue
            if not arrived[message]:
                self._at[rank] = position
                yield message

    def reason(self, rank: int, number: int) -> tuple[int, str]:
        """Name the transfer that would let this rank go on, and where its rank stands."""
        position, messages = self._at[rank], self._messages
        is_send = number >= messages.count
        message = number - messages.count if is_send else number
        awaited = messages.receive(message) if is_send else messages.send(message)
        peer = self._program.placement[awaited.stage]
        there = self._at[peer]
        stands = f"which is at position {there}, {self._program.ranks[peer][there]}"
        does = "posts" if is_send else "runs"
        blocked = self._program.ranks[rank][position]
        return position, f"blocks in {blocked} until rank {peer}, {stands}, {does} {awaited}"
