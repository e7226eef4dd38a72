"""Programs: for each rank, the ordered list of its actions; and the channels and links that they imply."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from pypipe.errors import ConfigurationError
from pypipe.program.actions import Action, Kind


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
    """Find the channel that a transfer uses.

    Args:
        action: a SEND_F, RECV_F, SEND_B or RECV_B.

    Raises:
        ConfigurationError: the action is not a transfer.
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
    raise ConfigurationError(f"{action} is not a transfer: give a SEND or a RECV, which use a channel")


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages that hold the whole model once, and the microbatches that pass through them.

    Args:
        stages: their indices, in the order in which a forward passes them: the k-th holds the model's k-th piece.
        microbatches: those of the batch's microbatches that this chain takes; there may be none.
    """

    stages: range
    microbatches: range


@dataclass(frozen=True, slots=True)
class Program:
    """For each rank, the ordered list of its actions. Pure data; `verify` checks whether it is sound.

    Most programs have one chain of stages. A bidirectional one (DualPipe) has a second copy of the model, which
    microbatches pass from the last rank to the first: its P stages have the indices P..2P-1 and stand on the
    ranks P-1..0, and each chain takes its share of the microbatches.

    Args:
        name: what a person calls it, such as "1f1b".
        n_microbatches: M; microbatches are 0..M-1.
        placement: for each stage, the rank that holds it.
        ranks: for each rank, its actions in order.
        chains: cut the stages, and also the microbatches, into consecutive ranges. Without it there is one chain
            of all stages and all microbatches.

    Raises:
        ConfigurationError: microbatches, ranks or stages are missing, a stage is placed on a rank that does not exist,
            or the chains leave out or repeat a stage or a microbatch.
    """

    name: str
    n_microbatches: int
    # A stage index names one place in one chain, so linear, looped, V-shaped and bidirectional placements differ
    # in these numbers only. A stage's neighbours come from previous_stage and next_stage, its microbatches from
    # microbatches_of: no other code derives them from the chains.
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...] = field(repr=False)
    chains: tuple[Chain, ...] = ()

    def __post_init__(self) -> None:
        if self.n_microbatches < 1:
            raise ConfigurationError(f"a program needs 1 microbatch or more, not {self.n_microbatches}")
        if not self.ranks:
            raise ConfigurationError("a program needs 1 rank or more: give `ranks` one list of actions for each")
        if not self.placement:
            raise ConfigurationError("a program needs 1 stage or more: give `placement` a rank for each")
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < len(self.ranks):
                raise ConfigurationError(
                    f"stage {stage} is placed on rank {rank}, but the ranks are 0..{len(self.ranks) - 1}"
                )
        if not self.chains:
            whole = Chain(range(len(self.placement)), range(self.n_microbatches))
            object.__setattr__(self, "chains", (whole,))
        _require_partition("stages", [chain.stages for chain in self.chains], self.n_stages, smallest=1)
        _require_partition("microbatches", [chain.microbatches for chain in self.chains], self.n_microbatches)

    @property
    def n_ranks(self) -> int:
        """P, the number of ranks."""
        return len(self.ranks)

    @property
    def n_stages(self) -> int:
        """S, the number of stages."""
        return len(self.placement)

    def chain_of(self, stage: int) -> Chain:
        """Find the chain that a stage belongs to."""
        return next(chain for chain in self.chains if stage in chain.stages)

    def previous_stage(self, stage: int) -> int | None:
        """Find the stage whose output is this stage's input; None for a stage that takes the batch itself."""
        return stage - 1 if stage > self.chain_of(stage).stages[0] else None

    def next_stage(self, stage: int) -> int | None:
        """Find the stage whose input is this stage's output; None for a stage whose output goes to the loss."""
        return stage + 1 if stage < self.chain_of(stage).stages[-1] else None

    def microbatches_of(self, stage: int) -> range:
        """List the microbatches that pass through a stage."""
        return self.chain_of(stage).microbatches

    def piece_of(self, stage: int) -> int:
        """Tell which piece of the model a stage holds, from 0: its place in its chain."""
        return stage - self.chain_of(stage).stages[0]

    def link_of(self, channel: Channel) -> Link:
        """Find the link that carries a channel, between the ranks of the channel's source and target stage."""
        return Link(channel.kind, self.placement[channel.source_stage], self.placement[channel.target_stage])

    def text(self) -> str:
        """Write the program as text: one line for each rank, actions separated by commas."""
        return "\n".join(",".join(map(str, actions)) for actions in self.ranks)

    def digest(self) -> str:
        """Compute a hex SHA-256 of actions, placement and chains: ranks with equal digests run the same program."""
        header = f"{self.n_microbatches};{','.join(map(str, self.placement))};{self.chains}\n"
        return hashlib.sha256((header + self.text()).encode()).hexdigest()

    def forward_only(self) -> Program:
        """Keep the F actions only, in the same order: what eval() runs, once lowered."""
        return replace(
            self,
            name=f"{self.name}, forward only",
            ranks=tuple(tuple(a for a in actions if a.kind is Kind.F) for actions in self.ranks),
        )

    def without_transfers(self) -> Program:
        """Leave out the transfers, as `lower` requires."""
        return replace(self, ranks=tuple(tuple(a for a in actions if not a.kind.is_transfer) for actions in self.ranks))

    @property
    def has_transfers(self) -> bool:
        """Whether its lists hold transfers: `lower` puts them there."""
        return any(action.kind.is_transfer for actions in self.ranks for action in actions)

    def compute_only(self) -> Program:
        """Keep F, B, I and W alone."""
        return replace(self, ranks=tuple(tuple(a for a in actions if a.kind.is_compute) for actions in self.ranks))


def _require_partition(what: str, parts: list[range], total: int, *, smallest: int = 0) -> None:
    """Require that ranges follow each other from 0 to a total."""
    end = 0
    for part in parts:
        if part.step != 1 or part.start != end or len(part) < smallest or part.stop != end + len(part):
            break
        end = part.stop
    else:
        if end == total:
            return
    shown = ", ".join(str(part) for part in parts)
    raise ConfigurationError(
        f"the {what} of the chains are {shown}: they have to follow each other, and cover 0..{total - 1}"
    )
