"""Actions: what one rank does in one step of a program, and their text form."""

from __future__ import annotations

import enum
import functools
import re
from typing import NamedTuple


@functools.total_ordering
class Kind(enum.Enum):
    """What an action does: compute, one end of a transfer, or a step of what the stage's data-parallel replicas share.

    B is a full backward; I and W are its input-gradient and weight-gradient halves (B = I + W; Qi et al.,
    "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2). UNSHARD gathers a stage's sharded parameters,
    RESHARD frees them again, and REDUCE_GRAD reduces its gradients among the stage's replicas: once a step each, for
    all microbatches. The names of all but the four kinds of compute are those of torch.distributed.pipelining.

    Attributes:
        label: the kind's text form, as in `Action`'s; equal to `value`, without Enum's slow property.
        order: position in the definition, by which kinds (and so actions) sort.
        is_compute: F, B, I or W.
        letter: one letter, for pictures: U, S and R stand for UNSHARD, RESHARD and REDUCE_GRAD.
        is_send: SEND_F or SEND_B.
        is_receive: RECV_F or RECV_B.
        is_transfer: any of these four.
        is_per_stage: UNSHARD, RESHARD or REDUCE_GRAD: done for the stage as a whole, so no microbatch is named.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the field's own name for it
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"

    def __init__(self, label: str) -> None:
        self.label = label
        self.order = len(type(self).__members__)
        self.is_send = label.startswith("SEND_")
        self.is_receive = label.startswith("RECV_")
        self.is_transfer = self.is_send or self.is_receive
        self.is_per_stage = label in ("UNSHARD", "RESHARD", "REDUCE_GRAD")
        self.is_compute = not (self.is_transfer or self.is_per_stage)
        self.letter = {"UNSHARD": "U", "RESHARD": "S", "REDUCE_GRAD": "R"}.get(label, label)

    def __lt__(self, other: object) -> bool:
        return self.order < other.order if isinstance(other, Kind) else NotImplemented

    # Enum hashes a member's name in Python code; members are singletons, so identity serves, and is much
    # faster.
    __hash__ = object.__hash__


_KIND_OF_LABEL = {kind.label: kind for kind in Kind}
# Longer labels first, so that SEND_F is not read as an unknown kind followed by F.
_PATTERN = re.compile(r"([0-9]+)(" + "|".join(sorted(_KIND_OF_LABEL, key=len, reverse=True)) + r")([0-9]*)")


class Action(NamedTuple):
    """One thing that one rank does for one stage and one microbatch.

    The text form is torch.distributed.pipelining's: `2F0` is stage 2, forward, microbatch 0; `2SEND_F0` sends
    that forward's output to stage 3, whose rank takes it with `3RECV_F0`; `3SEND_B0` sends the gradient of
    stage 3's input to stage 2, whose rank takes it with `2RECV_B0`. `2UNSHARD`, `2RESHARD` and `2REDUCE_GRAD` name no
    microbatch.

    Args:
        stage: the stage that acts, from 0: for a transfer, the one on the rank that lists the action.
        kind: what is done.
        microbatch: the microbatch, from 0; 0 for the kinds that name none.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.label}" + ("" if self.kind.is_per_stage else str(self.microbatch))

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action's text form; blanks around it are ignored.

        Args:
            text: for example `2F0` or `3RECV_F12`.

        Raises:
            ValueError: the text is not an action; the message shows the form.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None or _KIND_OF_LABEL[match[2]].is_per_stage == bool(match[3]):
            known = ", ".join(_KIND_OF_LABEL)
            raise ValueError(
                f"{text!r} is not an action: write stage, kind and microbatch, such as 2F0 or 3RECV_F0; "
                f"the kinds are {known}, of which the last three take no microbatch, such as 2REDUCE_GRAD"
            )
        return cls(int(match[1]), _KIND_OF_LABEL[match[2]], int(match[3] or 0))
