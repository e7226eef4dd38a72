"""Trees through real channels: the core over shared memory, both ends in this process."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from random import Random
from typing import Any

import channel_pair
import pytest
import torch
from channel_pair import Pair
from gradients import grad
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pypipe import _core
from pypipe.errors import LayoutError
from pypipe.program import Kind
from pypipe.runtime.transport import trees
from pypipe.runtime.transport.lease import Lease, SlotLease


def check(sent: Any, received: Lease) -> None:
    assert not channel_pair.difference(sent, received.tree)
    assert channel_pair.identities(sent) == channel_pair.identities(received.tree)


def pass_on(pair: Pair, tree: Any, microbatch: int = 0, *, training: bool = False) -> Lease:
    pair.sender.send(tree, microbatch, 1, 1)
    return pair.receiver.receive(microbatch, training=training)


@pytest.fixture(scope="module")
def shared() -> Any:
    with channel_pair.channel_pair(slots=3) as pair:
        yield pair


@settings(max_examples=60, deadline=None)
@given(trees_to_send=st.lists(channel_pair.trees(), min_size=1, max_size=6), data=st.data())
def test_any_sequence_of_trees_arrives_whatever_the_order_of_releases(
    shared: Pair, trees_to_send: list[Any], data: st.DataObject
) -> None:
    # One channel for all examples, so that layouts and slots have any history.
    held: list[tuple[Any, Lease]] = []
    under_way: deque[tuple[int, Any]] = deque()
    waiting = deque(enumerate(trees_to_send))
    try:
        while waiting or under_way or held:
            free = shared.slots - len(held) - len(under_way)
            choices = ["send"] * bool(waiting and free) + ["receive"] * bool(under_way) + ["release"] * bool(held)
            match data.draw(st.sampled_from(choices)):
                case "send":
                    microbatch, tree = waiting.popleft()
                    shared.sender.send(tree, microbatch, microbatch + 1, 7)
                    under_way.append((microbatch, tree))
                case "receive":
                    microbatch, tree = under_way.popleft()
                    received = shared.receiver.receive(microbatch, training=False)
                    held.append((tree, received))
                    assert (received.rows, received.batch_rows) == (microbatch + 1, 7)
                    check(tree, received)
                case "release":
                    tree, received = held.pop(data.draw(st.integers(0, len(held) - 1)))
                    try:
                        check(tree, received)  # nothing that came since has touched it
                    finally:
                        received.give_back()
    finally:
        for _, received in held:
            received.give_back()
        for microbatch, _ in under_way:
            shared.receiver.receive(microbatch, training=False).give_back()


@settings(max_examples=20, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), min_size=1, max_size=12), data=st.data())
def test_shapes_that_grow_and_shrink_at_any_message_arrive(
    shared: Pair, shapes: list[list[int]], data: st.DataObject
) -> None:
    before = shared.receiver.counters["slot_bytes"]
    for number, shape in enumerate(shapes):
        dtype = data.draw(st.sampled_from([torch.float32, torch.int8, torch.complex128]))
        tensor = torch.randn(shape).to(dtype)
        received = pass_on(shared, (tensor, number), number)
        try:
            check((tensor, number), received)
        finally:
            received.give_back()
        assert shared.receiver.counters["slot_bytes"] >= before
        before = shared.receiver.counters["slot_bytes"]


@settings(max_examples=15, deadline=None)
@given(st.lists(channel_pair.trees(most_leaves=4), min_size=1, max_size=10), st.integers(1, 3), st.integers(0, 999))
def test_two_threads_pass_any_sequence_of_trees(trees_to_send: list[Any], slots: int, seed: int) -> None:
    problems: list[str] = []
    random = Random(seed)
    with channel_pair.channel_pair(slots) as pair:

        def receive() -> None:
            held: list[Lease] = []
            try:
                for number, tree in enumerate(trees_to_send):
                    received = pair.receiver.receive(number, training=False)
                    problems.extend(filter(None, [channel_pair.difference(tree, received.tree)]))
                    held.append(received)
                    while len(held) == slots or (held and random.random() < 0.5):
                        held.pop(random.randrange(len(held))).give_back()
            except Exception as error:
                problems.append(repr(error))

        thread = threading.Thread(target=receive)
        thread.start()
        for number, tree in enumerate(trees_to_send):
            pair.sender.send(tree, number, 0, 0)
        thread.join()
        assert pair.receiver.counters["most_alive"] <= slots
    assert not problems


def test_slots_are_made_once_and_serve_smaller_messages_too() -> None:
    with channel_pair.channel_pair(slots=2) as pair:
        for size in [4000, 10, 1, 0, 4000, 3999, 17] * 3:
            pass_on(pair, torch.ones(size)).give_back()
        for counters in (pair.sender.counters, pair.receiver.counters):
            assert counters["allocations"] == 1
            assert counters["slots"] == 2
            assert counters["slot_bytes"] >= 16000
            assert counters["messages"] == 21
        assert pair.sender.counters["layouts"] == pair.receiver.counters["layouts"] == 6


def test_slots_grow_when_needed_and_do_not_shrink_to_and_fro() -> None:
    with channel_pair.channel_pair(slots=2) as pair:
        pass_on(pair, torch.ones(10)).give_back()
        pass_on(pair, torch.ones(100_000)).give_back()
        grown = pair.receiver.counters
        assert grown["allocations"] == 2
        for size in [10, 100_000] * 10:
            pass_on(pair, torch.ones(size)).give_back()
        after = pair.receiver.counters
        assert (after["allocations"], after["slot_bytes"]) == (grown["allocations"], grown["slot_bytes"])
        assert pair.sender.counters["allocations"] == 2


def test_sizes_that_creep_upwards_cost_few_allocations() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        for size in range(1, 20_001, 100):
            pass_on(pair, torch.ones(size)).give_back()
        assert pair.receiver.counters["allocations"] <= 8 * 5 + 1
        assert pair.receiver.counters["slot_bytes"] <= 80_000 * 1.125 + 4096


def test_a_slot_that_is_in_use_while_others_grow_keeps_its_bytes() -> None:
    with channel_pair.channel_pair(slots=3) as pair:
        small = pass_on(pair, torch.arange(5), 0)
        large = pass_on(pair, torch.arange(5000), 1)
        larger = pass_on(pair, torch.arange(50_000), 2)
        small.give_back()
        again = pass_on(pair, torch.arange(7), 3)
        for received, count in ((large, 5000), (larger, 50_000), (again, 7)):
            check(torch.arange(count), received)
            received.give_back()
        assert pair.receiver.counters["alive"] == 0
        assert pair.receiver.counters["most_alive"] == 3


def test_more_layouts_than_a_channel_keeps_are_forgotten_at_both_ends_and_may_come_back() -> None:
    with channel_pair.channel_pair(slots=2) as pair:
        for number in [*range(300), *range(300), *range(295, 305), 0, 0, 299]:
            received = pass_on(pair, (number, torch.full((1,), number)), number)
            check((number, torch.full((1,), number)), received)
            received.give_back()
        assert len(pair.sender._layouts) == 256
        assert len(pair.receiver._layouts) <= 512
        assert pair.sender.counters["layouts"] == pair.receiver.counters["layouts"] == 300 + 300 + 5 + 1
        assert pair.sender.counters["allocations"] == 1


def test_a_layout_that_is_forgotten_while_its_message_is_under_way_still_arrives() -> None:
    with channel_pair.channel_pair(slots=2) as pair:
        for number in range(255):
            pass_on(pair, number, 0).give_back()
        pass_on(pair, "last", 0).give_back()
        pair.sender.send(0, 1, 0, 0)  # a known layout ...
        pair.sender.send("new", 2, 0, 0)  # ... that this one makes the sender forget
        check(0, pair.receiver.receive(1, training=False))
        check("new", pair.receiver.receive(2, training=False))


def test_a_received_tensor_is_the_slots_memory_and_no_copy() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        first = pass_on(pair, [torch.randn(5), torch.randn(3, 4).t()])
        assert isinstance(first, SlotLease)
        message = first._message
        assert message is not None
        start, size = message.pointer, message.bytes
        tensors = first.tree
        for tensor in tensors:
            assert start <= tensor.data_ptr() < start + size
            assert tensor.data_ptr() % 64 == 0
            assert first.holds(tensor)
        assert not first.holds(torch.ones(3))
        addresses = [tensor.data_ptr() for tensor in tensors]
        first.give_back()
        second = pass_on(pair, [torch.randn(5), torch.randn(3, 4).t()])
        assert [tensor.data_ptr() for tensor in second.tree] == addresses
        assert all(a is not b for a, b in zip(second.tree, tensors, strict=True))


def test_hooks_on_a_received_tensor_do_not_meet_the_next_one() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        calls: list[int] = []
        for number in range(3):
            received = pass_on(pair, torch.ones(2, requires_grad=True), training=True)
            received.tree.register_hook(lambda _, number=number: calls.append(number))
            (received.tree * 2).sum().backward()
            assert torch.equal(grad(received.leaves[0]), torch.full((2,), 2.0))
            received.give_back()
        assert calls == [0, 1, 2]


@pytest.mark.parametrize("kind", ["activation", "view", "other", "mixed layout"])
def test_a_tensor_that_is_kept_for_a_backward_beyond_its_release_raises_the_version_error(kind: str) -> None:
    weight = torch.ones(4, requires_grad=True)
    tree: Any = {
        "activation": torch.ones(4, requires_grad=True),
        "view": torch.ones(2, 4, requires_grad=True),
        "other": torch.ones(4),
        "mixed layout": torch.ones(4, 2, requires_grad=True).t(),
    }[kind]
    with channel_pair.channel_pair(slots=1) as pair:
        received = pass_on(pair, [tree, torch.ones(1, requires_grad=True)], training=True)
        x = received.tree[0]
        kept = (weight * (x[0] if x.dim() == 2 else x)).sum()
        received.give_back()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


def test_a_tensor_whose_backward_is_done_before_the_release_raises_nothing() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        weight = torch.full((3,), 2.0, requires_grad=True)
        for number in range(4):
            received = pass_on(pair, torch.full((3,), float(number), requires_grad=True), training=True)
            (weight * received.tree).sum().backward()
            assert torch.equal(grad(received.leaves[0]), torch.full((3,), 2.0))
            received.give_back()
        assert torch.equal(grad(weight), torch.full((3,), 0.0 + 1 + 2 + 3))


def test_the_tensors_of_one_message_can_be_changed_in_place_without_disturbing_each_other() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        sent = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(3)]
        received = pass_on(pair, sent, training=True)
        weight = torch.ones(3, requires_grad=True)
        a, b, c = received.tree
        kept = weight * a * 3
        b.mul_(5)
        c.add_(1)
        (kept + b + c).sum().backward()
        assert [grad(leaf).tolist() for leaf in received.leaves] == [[3.0] * 3, [5.0] * 3]
        assert grad(weight).tolist() == [3.0] * 3


def test_only_tensors_that_need_a_gradient_at_the_sender_need_one_at_the_receiver() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        tree = {"a": torch.ones(2, requires_grad=True), "b": torch.ones(2), "c": torch.ones(2, dtype=torch.int32)}
        received = pass_on(pair, tree, training=True)
        assert {name: tensor.requires_grad for name, tensor in received.tree.items()} == {
            "a": True,
            "b": False,
            "c": False,
        }
        assert len(received.leaves) == 1
        received.give_back()
        received = pass_on(pair, tree, training=False)
        assert not any(tensor.requires_grad for tensor in received.tree.values())
        assert received.leaves == []


def test_a_kept_alias_is_seen_whatever_other_layouts_come_meanwhile() -> None:
    with channel_pair.channel_pair(slots=4) as pair:
        pair.sender.begin(2)
        pair.receiver.begin(2)
        aliases, messages = [], []
        for microbatch, size in enumerate([4, 5, 400]):  # the last in larger slots
            pair.sender.send(torch.ones(size), microbatch, 1, 1)
            received = pair.receiver.receive(microbatch, training=False)
            tensor, received.tree = received.tree, None
            aliases.append(tensor.detach())
            messages.append(received)
            del tensor
        assert [received.is_kept() for received in messages] == [True] * 3
        aliases.clear()
        assert [received.is_kept() for received in messages] == [False] * 3
        for received in messages:
            received.give_back_unread()


def test_a_channel_tells_whether_a_message_would_be_sent_at_once() -> None:
    with channel_pair.channel_pair(slots=2) as pair:
        assert not pair.sender.has_room()  # before any slot is there
        received = []
        for microbatch in range(2):
            pair.sender.send(torch.ones(3), microbatch, 1, 1)
            assert pair.sender.has_room() == (microbatch == 0)
            received.append(pair.receiver.receive(microbatch, training=False))
        assert not pair.sender.has_room()
        received[0].give_back()
        assert pair.sender.has_room()
        pair.sender.send(torch.ones(3000), 2, 1, 1)  # in larger slots; one of the old ones is still in use
        assert not pair.sender.has_room()
        received[1].give_back()
        assert pair.sender.has_room()


def test_a_released_slot_is_given_back_once() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        received = pass_on(pair, torch.ones(1))
        received.give_back()
        received.give_back()
        assert pair.receiver.counters["alive"] == 0
        assert not received.holds(torch.ones(1))
        check(torch.zeros(1), pass_on(pair, torch.zeros(1)))


def test_memory_that_somebody_still_looks_at_stays_mapped_after_the_channel_is_gone() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        kept = pass_on(pair, torch.arange(1000)).tree
        del pair
    gc.collect()
    assert torch.equal(kept, torch.arange(1000))


def test_slots_that_were_outgrown_are_unmapped() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        pass_on(pair, torch.ones(10)).give_back()
        before, descriptors = channel_pair.shared_mappings(), len(os.listdir("/proc/self/fd"))
        for size in (10_000, 100_000, 1_000_000):
            pass_on(pair, torch.ones(size)).give_back()
        gc.collect()
        assert channel_pair.shared_mappings() <= before
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_everything_goes_when_the_channels_go() -> None:
    def state() -> tuple[int, int, list[str]]:
        names = []
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/comm") as name:
                names.append(name.read().strip())
        return len(os.listdir("/proc/self/fd")), channel_pair.shared_mappings(), sorted(names)

    gc.collect()
    before = state()
    for _ in range(3):
        with channel_pair.channel_pair(slots=2, channels=2) as pair:
            pass_on(pair, torch.ones(100)).give_back()
            pass_on(pair, torch.ones(100_000))
        del pair
        gc.collect()
    assert state() == before


@pytest.mark.parametrize("microbatch", [0, 2])
def test_a_message_of_another_microbatch_is_a_mismatch_that_names_both(microbatch: int) -> None:
    with channel_pair.channel_pair(slots=2) as pair:
        pair.sender.send(torch.ones(1), 1, 0, 0)
        with pytest.raises(
            _core.CoreError, match=rf"rank 0 sent 0SEND_F1 where 0SEND_F{microbatch} was expected"
        ) as caught:
            pair.receiver.receive(microbatch, training=False)
        assert caught.value.fault == "mismatch"


def test_a_message_of_another_stage_or_kind_is_a_mismatch_that_names_both() -> None:
    with channel_pair.channel_pair(slots=2) as pair:
        pair.sender._stage, pair.sender._kind = 3, Kind.B.order
        pair.sender.send(torch.ones(1), 4, 0, 0)
        with pytest.raises(_core.CoreError, match="rank 0 sent 3SEND_B4 where 0SEND_F4 was expected") as caught:
            pair.receiver.receive(4, training=False)
        assert caught.value.fault == "mismatch"


def test_a_message_of_the_other_channel_of_a_link_is_a_mismatch() -> None:
    with channel_pair.channel_pair(slots=2, channels=2) as pair:
        pair.senders[1].send(torch.ones(1), 0, 0, 0)
        with pytest.raises(_core.CoreError, match="1SEND_F0 where 0SEND_F0 was expected") as caught:
            pair.receivers[0].receive(0, training=False)
        assert caught.value.fault == "mismatch"


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), channel_pair.trees(most_leaves=3)), min_size=2, max_size=10), st.data())
def test_two_channels_over_one_link_never_mix(messages: list[tuple[int, Any]], data: st.DataObject) -> None:
    with channel_pair.channel_pair(slots=2, channels=2) as pair:
        held: list[list[tuple[Any, Lease]]] = [[], []]
        for number, (channel, tree) in enumerate(messages):
            if len(held[channel]) == 2:
                sent, received = held[channel].pop(data.draw(st.integers(0, 1)))
                check(sent, received)
                received.give_back()
            pair.senders[channel].send(tree, number, number, 100)
            received = pair.receivers[channel].receive(number, training=False)
            assert received.rows == number
            check(tree, received)
            held[channel].append((tree, received))
        for channel in (0, 1):
            for sent, received in held[channel]:
                check(sent, received)
            count = sum(its == channel for its, _ in messages)
            assert pair.receivers[channel].counters["messages"] == pair.senders[channel].counters["messages"] == count


def test_a_tree_that_cannot_be_sent_leaves_the_channel_as_it_was() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        with pytest.raises(LayoutError, match=r"output\[1\] is a builtins.set"):
            pair.sender.send((torch.ones(1), {1}), 0, 0, 0)
        tree = (torch.ones(1), 2)
        check(tree, pass_on(pair, tree))


def test_a_description_that_is_too_long_is_refused_with_a_remedy_and_leaves_the_channel_as_it_was() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        pass_on(pair, 1).give_back()
        with pytest.raises(
            (LayoutError, _core.CoreError), match="send long lists of numbers and long strings as tensors"
        ):
            pair.sender.send("x" * 50_000_000, 0, 0, 0)
        check((2,), pass_on(pair, (2,)))


def test_a_parameter_arrives_as_a_plain_tensor() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        parameter = nn.Parameter(torch.ones(2))
        received = pass_on(pair, parameter, training=True)
        assert type(received.tree) is Tensor
        assert received.tree.requires_grad
        assert not received.tree.is_leaf


def test_messages_without_any_bytes_arrive() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        for tree in [(), None, torch.empty(0), [torch.empty(0, 3), {"a": torch.empty(2, 0)}], "text", 5]:
            received = pass_on(pair, tree, training=True)
            check(tree, received)
            received.give_back()


def test_receiving_under_inference_mode_works_and_so_does_training_afterwards() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        tree = [torch.ones(3, requires_grad=True), torch.arange(3)]
        with torch.inference_mode():
            received = pass_on(pair, tree)
            check(tree, received)
            assert received.tree[0].is_inference()
            received.give_back()
        received = pass_on(pair, tree, training=True)
        (received.tree[0] * received.tree[1]).sum().backward()
        assert grad(received.leaves[0]).tolist() == [0.0, 1.0, 2.0]


def test_the_order_in_which_tensors_are_packed_is_the_order_of_their_descriptions() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        a, b, c = (torch.full((n,), float(n)) for n in (1, 2, 3))
        returned = pair.sender.send({"c": c, "x": [b, c, (a,)]}, 0, 0, 0)
        assert [id(tensor) for tensor in returned] == [id(c), id(b), id(a)]
        assert len(trees.tensor_specs(trees.describe({"c": c, "x": [b, c, (a,)]}, []))) == 3
        check({"c": c, "x": [b, c, (a,)]}, pair.receiver.receive(0, training=False))
