"""How many NCCL communicators a pipeline has, and how much of a GPU each may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pypipe.program import Kind, Link, build
from pypipe.runtime.rendezvous.config import Config
from pypipe.runtime.transport.links.communicators import plan_communicators

H200 = 132


def links_of(name: str, n_ranks: int) -> list[Link]:
    program = build(name, n_ranks, 4 * n_ranks)
    pairs = {
        (program.placement[a], program.placement[b])
        for chain in program.chains
        for a, b in zip(chain.stages, chain.stages[1:], strict=False)
    }
    pairs = {(a, b) for a, b in pairs if a != b}
    return sorted({Link(Kind.F, a, b) for a, b in pairs} | {Link(Kind.B, b, a) for a, b in pairs})


def gpus(count: int, multiprocessors: int = H200, hosts: Sequence[str] = ("a",), **asked: object) -> list[Config]:
    one = replace(Config(device="cuda", multiprocessors=multiprocessors), **asked)  # type: ignore[arg-type]
    return [replace(one, host=hosts[rank % len(hosts)]) for rank in range(count)]


def taken(links: Sequence[Link], ctas: dict[tuple[int, int], int], rank: int, *, by_pair: bool) -> int:
    ends = [tuple(sorted((link.source_rank, link.target_rank))) for link in links]
    return sum(ctas[a, b] for a, b in (set(ends) if by_pair else ends) if rank in (a, b))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "dualpipe", "dualpipev"])
@pytest.mark.parametrize("n_ranks", [2, 4, 8])
def test_what_a_rank_has_resident_leaves_half_of_its_gpu_to_compute(name: str, n_ranks: int) -> None:
    links = links_of(name, n_ranks)
    for multiprocessors in (8, 20, 40, 68, 108, H200):
        plan = plan_communicators(links, gpus(n_ranks, multiprocessors))
        for rank in range(n_ranks):
            assert 2 * taken(links, plan.ctas, rank, by_pair=plan.by_pair) <= multiprocessors
        assert bool(plan.reason) == plan.by_pair
    assert not plan_communicators(links, gpus(n_ranks, H200)).by_pair


def test_links_within_a_host_get_more_than_links_between_hosts() -> None:
    links = links_of("1f1b", 4)
    plan = plan_communicators(links, gpus(4, hosts=("a", "a", "b", "b")))
    assert plan.ctas == {(0, 1): 16, (1, 2): 4, (2, 3): 16}


def test_a_rank_with_many_links_halves_what_each_gets_before_it_gives_up_a_communicator_for_each() -> None:
    plan = plan_communicators(links_of("dualpipe", 8), gpus(8))
    assert not plan.by_pair
    assert set(plan.ctas.values()) == {8}
    plan = plan_communicators(links_of("1f1b", 4), gpus(4, multiprocessors=40))
    assert not plan.by_pair
    assert set(plan.ctas.values()) == {4}


def test_too_small_a_gpu_is_said_in_words_with_the_rank_that_has_most_links() -> None:
    plan = plan_communicators(links_of("1f1b", 4), gpus(4, multiprocessors=20))
    assert plan.by_pair
    assert set(plan.ctas.values()) == {4}
    assert plan.reason is not None
    assert "rank 1 has 4 links" in plan.reason
    assert "20 multiprocessors" in plan.reason


def test_what_the_user_asks_for_is_what_he_gets() -> None:
    links = links_of("1f1b", 4)
    assert plan_communicators(links, gpus(4, communicators="pair")).by_pair
    forced = plan_communicators(links, gpus(4, multiprocessors=6, communicators="link"))
    assert (forced.by_pair, set(forced.ctas.values()), forced.reason) == (False, {1}, None)
    wide = plan_communicators(links, gpus(4, max_ctas=32))
    assert wide.by_pair  # four of 32 are more than half of 132
    assert set(wide.ctas.values()) == {32}
    assert wide.reason is not None
    assert "4 NCCL communicators of 32 thread blocks" in wide.reason


def test_where_the_number_of_multiprocessors_is_unknown_nothing_is_withheld() -> None:
    plan = plan_communicators(links_of("1f1b", 4), gpus(4, multiprocessors=0))
    assert (plan.by_pair, set(plan.ctas.values())) == (False, {16})
