"""Which transfers go out together where each pair of ranks has one communicator."""

from __future__ import annotations

from pypipe.program.actions import Action
from pypipe.program.programs import Channel, Program, channel_of

Message = tuple[Channel, int]


def ends_of_groups(program: Program, rank: int) -> list[bool]:
    """Tell, for each position of a rank's list, whether a group of transfers ends there.

    A communicator runs one group at a time, and to issue a group is to wait until its messages are announced. So
    opposite transfers share a group, in which both run at once, only where neither can depend on the other: they stand
    next to each other in this rank's list, and no compute action stands between them in the other rank's list either.
    Any other transfer is a group of its own. All ranks list what they exchange in one order
    (`exchanges.order_exchanges`), so a rank that waits in a group waits for what comes earlier in that order.

    Args:
        program: lowered for synchronous transfers.
        rank: whose list.
    """
    segments = _segments(program)
    actions = program.ranks[rank]
    ends = []
    for position, action in enumerate(actions):
        if not action.kind.is_transfer:
            ends.append(False)
            continue
        after = actions[position + 1] if position + 1 < len(actions) else None
        together = (
            after is not None
            and after.kind.is_transfer
            and _peer(program, rank, after) == _peer(program, rank, action)
            and segments[_peer(program, rank, action), _message(after)]
            == segments[_peer(program, rank, action), _message(action)]
        )
        ends.append(not together)
    return ends


def _message(action: Action) -> Message:
    return channel_of(action), action.microbatch


def _peer(program: Program, rank: int, action: Action) -> int:
    link = program.link_of(channel_of(action))
    return link.target_rank if link.source_rank == rank else link.source_rank


def _segments(program: Program) -> dict[tuple[int, Message], int]:
    """Count, for each rank and message, the actions other than transfers that stand before its transfer."""
    segments = {}
    for rank, actions in enumerate(program.ranks):
        computed = 0
        for action in actions:
            if not action.kind.is_transfer:
                computed += 1
            else:
                segments[rank, _message(action)] = computed
    return segments
