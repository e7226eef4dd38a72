"""Both ways between two ranks, for what they exchange at the end of a step: over links of kind W."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pypipe.program import Channel, Kind
from pypipe.runtime.transport.channel import ReceiveChannel, SendChannel

__all__ = ["Exchange", "Exchanges"]


class Exchanges:
    """A rank's exchanges, one for each pair of stages.

    Args:
        senders, receivers: the ends of channels on this rank.
        issue: ends a run of transfers, where they are held back to be issued together.
    """

    def __init__(
        self,
        senders: Mapping[Channel, SendChannel],
        receivers: Mapping[Channel, ReceiveChannel],
        issue: Callable[[], None] | None,
    ) -> None:
        self._senders, self._receivers, self._issue = senders, receivers, issue
        self._made: dict[tuple[int, int], Exchange] = {}

    def between(self, mine: int, other: int) -> Exchange:
        """The exchange between a stage of this rank and one of another's."""
        if (mine, other) not in self._made:
            sender, receiver = (
                self._senders[Channel(Kind.W, mine, other)],
                self._receivers[Channel(Kind.W, other, mine)],
            )
            self._made[mine, other] = Exchange(sender, receiver, self._issue)
        return self._made[mine, other]


class Exchange:
    """Both ways between two stages on two ranks."""

    def __init__(self, sender: SendChannel, receiver: ReceiveChannel, issue: Callable[[], None] | None) -> None:
        self._sender = sender
        self._receiver = receiver
        self._issue = issue
        self._sent = self._received = 0
        self._slot: Any = None

    def begin(self, tree: Any, *, answered: bool = True) -> None:
        """Sends a tree.

        Args:
            tree: the tree.
            answered: whether the other end sends one at the same time.
        """
        self._sender.send(tree, self._sent, 0, 0)
        self._sent = (self._sent + 1) % (1 << 31)
        if answered:  # after the send: over NCCL to post is to wait until the other end sends
            self._receiver.post(0)
        if self._issue is not None:
            self._issue()
        self._sender.issued()

    def expect(self) -> None:
        """Begins where only the other end sends a tree."""
        self._receiver.post(0)
        if self._issue is not None:
            self._issue()

    def receive(self) -> Any:
        """The next tree, in a slot."""
        self._slot = self._receiver.receive(self._received, training=False)
        self._received = (self._received + 1) % (1 << 31)
        return self._slot.tree

    def finish(self) -> None:
        """From now on what was sent may be overwritten."""
        self._sender.finish()

    def release(self) -> None:
        """Gives the last tree's slot back."""
        self._slot.give_back()
        self._slot = None
