"""What a pipeline holds in memory: slots as the program needs them, activations as the schedule promises, no leaks."""

from __future__ import annotations

import memory_cases
import pytest
from rank_pool import RankPool

SCHEDULES = ["ScheduleGPipe", "Schedule1F1B"]
LINKS = ["shm", "c10d"]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("n_microbatches", [1, 3, 6])
def test_a_steady_state_step_allocates_nothing_and_slots_are_as_many_as_the_program_needs(
    ranks: RankPool, schedule: str, n_microbatches: int, link: str
) -> None:
    size = 4
    seen = set()
    for rank, (before, after) in enumerate(ranks.run(size, memory_cases.counters, schedule, n_microbatches, link)):
        for (kind, source, target), counted in after.items():
            where = f"rank {rank}, {kind} {source} -> {target}: {counted}"
            earlier = before[kind, source, target]
            for name in ("slots", "slot_bytes", "layouts"):
                assert counted[name] == earlier[name], f"{where}, {name} was {earlier[name]}"
            if link == "c10d" and "alive" not in counted:
                # A sender packs into a buffer of its own, a new one where the last is still under way: at most one
                # for each slot, and two sizes were sent.
                assert counted["allocations"] <= 2 * counted["slots"], where
            else:
                assert counted["allocations"] == earlier["allocations"], f"{where}, earlier {earlier}"
            assert counted["messages"] > earlier["messages"], where
            if "most_alive" in counted:
                assert counted["most_alive"] <= counted["slots"], where
                assert counted["alive"] == 0, where
            forward = target == source + 1
            seen.add((rank, forward, source))
            if forward:
                expected = n_microbatches if schedule == "ScheduleGPipe" else min(n_microbatches, size - source)
                assert counted["slots"] == expected, where
            else:
                assert counted["slots"] == 2, where  # one in use, one for the next
    assert len(seen) == 4 * (size - 1)  # both ends of all channels


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("size", "n_microbatches"), [(2, 2), (2, 8), (3, 8), (4, 1), (4, 3), (4, 8)])
def test_activations_alive_are_those_of_the_schedule_and_nothing_that_was_sent_stays_alive(
    ranks: RankPool, schedule: str, size: int, n_microbatches: int
) -> None:
    for rank, saw in enumerate(ranks.run(size, memory_cases.watched, schedule, n_microbatches)):
        # Each microbatch saves its input and a tanh twice (the output of tanh, and the input of what follows).
        one = 3 * saw["bytes of one microbatch"]
        alive = n_microbatches if schedule == "ScheduleGPipe" else min(n_microbatches, size - rank)
        assert saw["saved bytes at most"] == one * alive, f"rank {rank}: {saw}, expected {one * alive}"
        assert saw["saved bytes after a step"] == 0, f"rank {rank}: {saw}"
        assert saw["gradients"] == 0, f"rank {rank}: gradients of the input outlive their sending: {saw}"
        if rank < size - 1:
            assert saw["outputs"] == 0, f"rank {rank}: outputs outlive their sending: {saw}"
            assert saw["output objects"] == 0, f"rank {rank}: outputs outlive their sending: {saw}"


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fifty_steps_leave_nothing_behind(ranks: RankPool, schedule: str, link: str) -> None:
    found = [text for texts in ranks.run(3, memory_cases.many_steps, schedule, link) for text in texts]
    assert not found, "\n".join(found)


def test_no_gradient_of_a_parameter_stays_in_a_slot(ranks: RankPool) -> None:
    found = [text for texts in ranks.run(3, memory_cases.gradients_of_slots) for text in texts]
    assert not found, "\n".join(found)


def test_a_gradient_that_goes_through_a_stage_as_it_came_does_not_cost_its_slot(ranks: RankPool) -> None:
    found = [text for texts in ranks.run(3, memory_cases.slots_passed_on) for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("how", ["closed", "closed but kept", "dropped", "failed"])
def test_a_schedule_that_is_gone_leaves_no_descriptors_threads_or_mappings(
    ranks: RankPool, how: str, link: str
) -> None:
    found = [text for texts in ranks.run(2, memory_cases.leftovers, how, link) for text in texts]
    assert not found, "\n".join(found)
