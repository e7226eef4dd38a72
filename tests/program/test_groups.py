"""Groups of transfers where each pair of ranks has one communicator."""

from __future__ import annotations

import pytest

from pypipe.program import Channel, build, builder_names, channel_of, lower
from pypipe.program.groups import ends_of_groups


def _groups(name: str, n_ranks: int, n_microbatches: int) -> list[list[list[str]]]:
    program = lower(build(name, n_ranks, n_microbatches), synchronous=True)
    found = []
    for rank, actions in enumerate(program.ranks):
        groups: list[list[str]] = [[]]
        for action, ends in zip(actions, ends_of_groups(program, rank), strict=True):
            if not action.kind.is_compute:
                groups[-1].append(str(action))
            if ends:
                groups.append([])
        assert groups.pop() == [], "every transfer belongs to a group that ends"
        found.append(groups)
    return found


def test_opposite_transfers_share_a_group_where_neither_depends_on_the_other() -> None:
    first, second = _groups("1f1b", 2, 4)
    shared = [group for group in first if len(group) > 1]
    assert shared, first
    for group in shared:
        assert {action[1:5] for action in group} == {"SEND", "RECV"}
        counterpart = {action.replace("SEND", "X").replace("RECV", "SEND").replace("X", "RECV")[1:] for action in group}
        assert counterpart in [{action[1:] for action in other} for other in second]


def test_a_gradient_is_not_grouped_with_the_output_that_it_comes_from() -> None:
    first, _ = _groups("gpipe", 2, 3)
    assert ["0SEND_F2"] in first
    assert ["0RECV_B2"] in first


@pytest.mark.parametrize("name", builder_names())
def test_with_groups_as_rendezvous_and_one_at_a_time_every_rank_reaches_its_end(name: str) -> None:
    """The hosts: a group is issued when its messages are announced, and those are when their senders come to them."""
    for n_ranks, n_microbatches in ((2, 4), (4, 8)):
        program = lower(build(name, n_ranks, n_microbatches), synchronous=True)
        ends = [ends_of_groups(program, rank) for rank in range(n_ranks)]
        at = [0] * n_ranks
        announced: set[tuple[Channel, int]] = set()
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(program.ranks):
                while at[rank] < len(actions):
                    group = [at[rank]]
                    while not ends[rank][group[-1]] and not actions[group[-1]].kind.is_compute:
                        group.append(group[-1] + 1)
                    transfers = [actions[position] for position in group if not actions[position].kind.is_compute]
                    messages = {(channel_of(action), action.microbatch) for action in transfers}
                    sent = {(channel_of(action), action.microbatch) for action in transfers if action.kind.is_send}
                    moved = moved or not sent <= announced
                    announced |= sent
                    if not messages <= announced:
                        break
                    at[rank] = group[-1] + 1
                    moved = True
        assert at == [len(actions) for actions in program.ranks]
