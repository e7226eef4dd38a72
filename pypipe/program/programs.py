"""Programs: for each rank, the ordered list of its actions; and the channels and links that they imply."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from .actions import Action, Kind


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """One stage boundary in one direction.

    Args:
        kind: Kind.F for outputs on their way to the next stage, Kind.B for gradients on their way back.
        source_stage: the stage that sends.
        target_stage: the stage that receives.
    """

    kind: Kind
    source_stage: int
    target_stage: int

    def __str__(self) -> str:
        return f"{self.kind.label} {self.source_stage}->{self.target_stage}"


@dataclass(frozen=True, slots=True, order=True)
class Link:
    """One directed rank-to-rank FIFO for one kind of traffic; it carries one channel or several.

    Args:
        kind: Kind.F or Kind.B.
        source_rank: the rank that sends.
        target_rank: the rank that receives.
    """

    kind: Kind
    source_rank: int
    target_rank: int

    def __str__(self) -> str:
        return f"{self.kind.label} from rank {self.source_rank} to rank {self.target_rank}"


def channel_of(action: Action) -> Channel:
    """The channel that a transfer uses.

    Args:
        action: a SEND_F, RECV_F, SEND_B or RECV_B.

    Raises:
        ValueError: the action is no transfer.
    """
    stage = action.stage
    match action.kind:
        case Kind.SEND_F:
            return Channel(Kind.F, stage, stage + 1)
        case Kind.RECV_F:
            return Channel(Kind.F, stage - 1, stage)
        case Kind.SEND_B:
            return Channel(Kind.B, stage, stage - 1)
        case Kind.RECV_B:
            return Channel(Kind.B, stage + 1, stage)
    raise ValueError(f"{action} is no transfer, so it uses no channel")


@dataclass(frozen=True, slots=True)
class Program:
    """For each rank, the ordered list of its actions. Pure data: whether it is sound is for `verify` to say.

    Args:
        name: what a person calls it, such as "1f1b".
        n_microbatches: M; microbatches are 0..M-1.
        placement: for each stage, the rank that holds it.
        ranks: for each rank, its actions in order.

    Raises:
        ValueError: no microbatch, no rank, no stage, or a stage placed on a rank that is not there.
    """

    name: str
    n_microbatches: int
    # A stage index names one place in one chain of stages, so linear, looped and V-shaped placements differ
    # in these numbers only. A bidirectional program (DualPipe) has a second chain: its stages get indices
    # P..2P-1 of their own, placed on ranks P-1..0, and each chain takes a share of the microbatches. Then a
    # field that lists each chain's first stage joins this class, and only previous_stage, next_stage and
    # microbatches_of look at it: all other code of this package learns a stage's neighbours and microbatches
    # from these three.
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...] = field(repr=False)

    def __post_init__(self) -> None:
        if self.n_microbatches < 1:
            raise ValueError(f"a program needs 1 microbatch or more, not {self.n_microbatches}")
        if not self.ranks:
            raise ValueError("a program needs 1 rank or more: give `ranks` one list of actions for each")
        if not self.placement:
            raise ValueError("a program needs 1 stage or more: give `placement` a rank for each")
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < len(self.ranks):
                raise ValueError(f"stage {stage} is placed on rank {rank}, but the ranks are 0..{len(self.ranks) - 1}")

    @property
    def n_ranks(self) -> int:
        """P, the number of ranks."""
        return len(self.ranks)

    @property
    def n_stages(self) -> int:
        """S, the number of stages."""
        return len(self.placement)

    def previous_stage(self, stage: int) -> int | None:
        """The stage whose output is this stage's input; None for a stage that takes the batch itself."""
        return stage - 1 if stage > 0 else None

    def next_stage(self, stage: int) -> int | None:
        """The stage whose input is this stage's output; None for a stage whose output goes to the loss."""
        return stage + 1 if stage < len(self.placement) - 1 else None

    def microbatches_of(self, stage: int) -> range:
        """The microbatches that pass through a stage."""
        return range(self.n_microbatches)

    def link_of(self, channel: Channel) -> Link:
        """The link that carries a channel: it names the channel's source and target rank."""
        return Link(channel.kind, self.placement[channel.source_stage], self.placement[channel.target_stage])

    def text(self) -> str:
        """The program as text: one line for each rank, actions separated by commas."""
        return "\n".join(",".join(map(str, actions)) for actions in self.ranks)

    def digest(self) -> str:
        """A hex SHA-256 of actions and placement: ranks that show the same one run the same program."""
        header = f"{self.n_microbatches};{','.join(map(str, self.placement))}\n"
        return hashlib.sha256((header + self.text()).encode()).hexdigest()

    def forward_only(self) -> Program:
        """The same program with its F actions only, in the same order: what eval() runs, once lowered."""
        return replace(
            self,
            name=f"{self.name}, forward only",
            ranks=tuple(tuple(a for a in actions if a.kind is Kind.F) for actions in self.ranks),
        )

    def compute_only(self) -> Program:
        """The same program without its transfers: what `lower` takes."""
        return replace(self, ranks=tuple(tuple(a for a in actions if a.kind.is_compute) for actions in self.ranks))
