"""How many NCCL communicators a pipeline has, and how much of a GPU each may take.

A transfer is a kernel that holds thread blocks, one on a multiprocessor, until the other end's kernel runs. So what can
hold them at once has to leave room for compute, and for the transfer that the others wait for: all communicators of a
rank together get half of its multiprocessors at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pypipe.errors import ConfigurationError
from pypipe.program import Link
from pypipe.runtime import environment, libraries
from pypipe.runtime.rendezvous.config import Config

__all__ = ["Communicators", "communicators", "max_ctas", "multiprocessors", "plan_communicators"]

# Thread blocks of one communicator: a channel of NCCL carries some 37 GB/s at most, of which NVLink wants ten and more
# and a network card one or two. Powers of two, as NCCL's own numbers of channels.
_WITHIN_HOST, _BETWEEN_HOSTS = 16, 4
_FEWEST_FOR_A_LINK = 4  # with fewer, one communicator for a pair of ranks carries more


def communicators() -> str:
    """What PYPIPE_NCCL_COMMUNICATORS says.

    Raises:
        ConfigurationError: it is not one of its choices.
    """
    return environment.read("PYPIPE_NCCL_COMMUNICATORS", ("auto", "link", "pair"))


def max_ctas() -> int:
    """What PYPIPE_NCCL_MAX_CTAS says: the most thread blocks of a communicator; 0 for auto.

    Raises:
        ConfigurationError: it is not such a number.
    """
    value = environment.read("PYPIPE_NCCL_MAX_CTAS")
    if value == "auto":
        return 0
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 64):  # NCCL's own limit
        raise ConfigurationError(f"PYPIPE_NCCL_MAX_CTAS={value!r}: it takes a whole number, 1 to 64, or auto")
    return int(value)


def multiprocessors(device: torch.device, choice_of_link: str) -> int:
    """How many there are on this rank's GPU; 0 where there is none, or where it cannot be known now.

    Args:
        device: where the stages of this rank live.
        choice_of_link: what PYPIPE_LINK says.
    """
    if device.type != "cuda" and choice_of_link != "nccl":
        return 0
    try:
        return libraries.gpu(device.index or 0).multiprocessors
    except ConfigurationError:
        return 0  # said when a link is opened, if one is NCCL's at all


@dataclass(frozen=True)
class Communicators:
    """The communicators of a pipeline.

    Attributes:
        by_pair: whether two ranks have one for all links between them, which runs one group of transfers after another;
            else each link has its own.
        ctas: for the two ranks of each communicator, in ascending order, the most thread blocks that it takes.
        reason: why they are fewer than there are links, where PYPIPE_NCCL_COMMUNICATORS did not ask for that.
    """

    by_pair: bool
    ctas: dict[tuple[int, int], int]
    reason: str | None = None


def plan_communicators(links: Iterable[Link], configs: Sequence[Config]) -> Communicators:
    """Decides, alike on every rank.

    Args:
        links: all of a pipeline's that NCCL carries.
        configs: of all ranks; `communicators` and `max_ctas` are the same in each.
    """
    links = list(links)
    choice, limit = configs[0].communicators, configs[0].max_ctas
    of_link, of_pair = _counts(links, by_pair=False), _counts(links, by_pair=True)
    tried, most = [], limit or _WITHIN_HOST  # in order of preference: by pair or not, and how many thread blocks
    if choice != "pair":
        fewest = most if limit else 1 if choice == "link" else _FEWEST_FOR_A_LINK
        tried = [(False, ctas) for ctas in _halves(most, fewest)]
    if choice != "link":
        tried += [(True, ctas) for ctas in _halves(most, most if limit else 1)]
    for by_pair, ctas in tried:
        shares = {ends: ctas if limit else min(ctas, _reach(ends, configs)) for ends in of_pair}
        if _fits(of_pair if by_pair else of_link, shares, configs):
            break
    reason = None
    if by_pair and choice == "auto":
        rank = max(range(len(configs)), key=lambda rank: sum(n for ends, n in of_link.items() if rank in ends))
        count = sum(n for ends, n in of_link.items() if rank in ends)
        reason = (
            f"rank {rank} has {count} links, and {count} NCCL communicators of {limit or _FEWEST_FOR_A_LINK} thread "
            f"blocks each would take more than half of its GPU's {configs[rank].multiprocessors} multiprocessors: two "
            "ranks have one communicator for all that they exchange, which runs one group of transfers after another "
            "(PYPIPE_NCCL_COMMUNICATORS=link overrules that)"
        )
    return Communicators(by_pair, shares, reason)


def _counts(links: Iterable[Link], *, by_pair: bool) -> Counter[tuple[int, int]]:
    """How many communicators two ranks have."""
    counts = Counter(
        (min(each.source_rank, each.target_rank), max(each.source_rank, each.target_rank)) for each in links
    )
    return Counter(dict.fromkeys(counts, 1)) if by_pair else counts


def _halves(most: int, fewest: int) -> list[int]:
    numbers = [most]
    while numbers[-1] // 2 >= fewest:
        numbers.append(numbers[-1] // 2)
    return numbers


def _reach(ends: tuple[int, int], configs: Sequence[Config]) -> int:
    return _WITHIN_HOST if configs[ends[0]].host == configs[ends[1]].host else _BETWEEN_HOSTS


def _fits(counts: Counter[tuple[int, int]], shares: dict[tuple[int, int], int], configs: Sequence[Config]) -> bool:
    """Whether no rank's communicators take more than half of its multiprocessors."""
    taken: Counter[int] = Counter()
    for ends, count in counts.items():
        for rank in ends:
            taken[rank] += count * shares[ends]
    return all(not configs[rank].multiprocessors or 2 * n <= configs[rank].multiprocessors for rank, n in taken.items())
