"""The gradients of a stage's outputs as they come in: memory that is lent to a backward, and to whatever hooks it runs.

A gradient lies in a slot, or in another stage's hands. A hook may keep it, and autograd may make it somebody's `.grad`:
then it is theirs, with its slot, for which the channel has one spare; from then on they get copies.
"""

from __future__ import annotations

from torch import Tensor

from pypipe.errors import PipelineError
from pypipe.runtime.tensor_memory import memory_parts
from pypipe.runtime.transport.channels import ReceiveChannel, Received, is_shared
from pypipe.runtime.transport.local import Handed, LocalChannel

__all__ = ["GradientLoans", "Loan"]


class Loan:
    """One microbatch's gradients, until they are given back.

    Attributes:
        gradients: one for each output that required a gradient; None where nothing depends on it.
    """

    __slots__ = ("copies", "gradients", "slot")

    def __init__(self, gradients: list[Tensor | None], slot: Received | Handed | None, copies: list[Tensor]) -> None:
        self.gradients = gradients
        self.slot = slot
        self.copies = copies

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory that is only lent, or that the weight half of this backward reads."""
        if self.slot is not None:
            return self.slot.holds(tensor)
        if not self.copies:
            return False
        pointers = {copy.untyped_storage().data_ptr() for copy in self.copies}
        return any(part.untyped_storage().data_ptr() in pointers for part in memory_parts(tensor))


class GradientLoans:
    """Takes and gives back.

    Args:
        channel: where gradients come from.
        splits: whether backwards are split, so that several loans are out at once. Then it shows late that somebody
            keeps one, when there is no slot to spare for the others: the first step tries it out with copies.
    """

    def __init__(self, channel: ReceiveChannel | LocalChannel, *, splits: bool) -> None:
        self._channel = channel
        self._copying = not channel.storages_apart
        self._trying = splits and channel.storages_apart and isinstance(channel, ReceiveChannel)
        self._lost: Received | Handed | None = None

    def take(self, microbatch: int) -> Loan:
        """Waits for this microbatch's gradients."""
        received = self._channel.receive(microbatch, training=False)
        tree, received.tree = received.tree, None
        gradients: list[Tensor | None] = tree if isinstance(tree, list) else [tree]
        del tree
        if not (self._copying or self._trying):
            return Loan(gradients, received, [])
        gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        received.release(unseen=True)
        return Loan(gradients, None, [gradient for gradient in gradients if gradient is not None])

    def give_back(self, loan: Loan) -> None:
        """After the last half of the backward. Nobody else uses `loan.gradients` any more."""
        loan.gradients = []
        if loan.slot is None:
            self._copying = self._copying or is_shared(loan.copies)
            return
        if not loan.slot.is_shared():
            loan.slot.release(unseen=True)
            return
        if self._lost is not None:
            raise PipelineError(
                "hooks of this stage have begun to keep the gradients of its output, more of them at once than there "
                "are slots to spare: keep gradient.clone() instead"
            )
        self._lost = loan.slot
        self._copying = True

    def end_step(self) -> None:
        """The first step without an error ends the trial."""
        self._trying = False
