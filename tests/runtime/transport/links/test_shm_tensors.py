"""The tensors of messages that are made before the messages come."""

from __future__ import annotations

import gc
from typing import Any

import channel_pair
import torch
from channel_pair import Pair
from gradients import grad
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pypipe.runtime.transport.lease import Lease


def _begin(pair: Pair, *, training: bool) -> None:
    pair.sender.begin(2 if training else 3)
    pair.receiver.begin(2 if training else 3)


def _pass_on(pair: Pair, tree: Any, microbatch: int = 0, *, training: bool = True) -> Lease:
    pair.sender.send(tree, microbatch, 1, 1)
    return pair.receiver.receive(microbatch, training=training)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@settings(max_examples=60, deadline=None)
@given(
    pool=st.lists(channel_pair.trees(most_leaves=4), min_size=1, max_size=2),
    steps=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=6)), max_size=5),
    data=st.data(),
)
def test_whatever_was_made_ahead_a_message_is_what_was_sent_and_new(
    pool: list[Any], steps: list[tuple[bool, list[int]]], data: st.DataObject
) -> None:
    seen: list[Tensor] = []  # kept, so that no two have one id
    with channel_pair.channel_pair(slots=3) as pair:
        for training, numbers in steps:
            _begin(pair, training=training)
            held: list[tuple[Any, Lease]] = []
            with torch.set_grad_enabled(training):
                for microbatch, number in enumerate(numbers):
                    tree = pool[number % len(pool)]
                    received = _pass_on(pair, tree, microbatch, training=training)
                    _check(tree, received, training, seen)
                    held.append((tree, received))
                    if len(held) == pair.slots or data.draw(st.booleans()):
                        tree, received = held.pop(data.draw(st.integers(0, len(held) - 1)))
                        assert not channel_pair.difference(tree, received.tree)
                        received.give_back()
            for _, received in held:
                received.give_back()


def _check(tree: Any, received: Lease, training: bool, seen: list[Tensor]) -> None:
    assert not channel_pair.difference(tree, received.tree)
    wanted = [tensor.requires_grad and training for tensor in _tensors(tree)]
    assert [tensor.requires_grad for tensor in _tensors(received.tree)] == wanted
    assert all(leaf.is_leaf and leaf.grad is None for leaf in received.leaves)
    unique = {id(tensor): tensor for tensor in _tensors(received.tree)}
    assert not any(tensor is other for tensor in unique.values() for other in seen)
    seen += unique.values()


def test_gradients_of_several_messages_in_one_slot_do_not_meet() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        _begin(pair, training=True)
        for microbatch in range(5):
            x = torch.full((3,), float(microbatch)).requires_grad_()
            received = _pass_on(pair, x, microbatch)
            (received.tree * (microbatch + 1)).sum().backward()
            assert grad(received.leaves[0]).tolist() == [microbatch + 1.0] * 3
            received.give_back()


class _Mode(TorchDispatchMode):
    """Sees every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_tensors_of_the_step_that_it_is_on_in() -> None:
    with channel_pair.channel_pair(slots=1) as pair:
        x = torch.ones(3).requires_grad_()
        for step in range(4):
            mode = _Mode()
            with mode:
                _begin(pair, training=True)
                _pass_on(pair, x).give_back()
            assert any("_unsafe_view" in name for name in mode.seen), step
            _begin(pair, training=True)
            _pass_on(pair, x).give_back()
        with torch.inference_mode():
            _begin(pair, training=False)
            received = _pass_on(pair, x, training=False)
            assert received.tree.is_inference()
            received.give_back()
        _begin(pair, training=True)
        received = _pass_on(pair, x)
        assert not received.tree.is_inference()
        assert received.tree.requires_grad
        received.give_back()


def test_slots_that_an_eval_outgrew_are_let_go_by_the_next_step() -> None:
    with channel_pair.channel_pair(slots=2) as pair:
        x = torch.ones(100)
        mapped = []
        for size in (100, 10_000, 1_000_000):
            _begin(pair, training=False)
            with torch.no_grad():
                _pass_on(pair, torch.ones(size), training=False).give_back()
            _begin(pair, training=True)
            for microbatch in range(3):
                _pass_on(pair, x, microbatch).give_back()
            gc.collect()
            mapped.append(channel_pair.shared_mappings())
        assert mapped == [mapped[0]] * 3


def test_what_was_made_ahead_does_not_keep_outgrown_slots() -> None:
    with channel_pair.channel_pair(slots=2) as pair:
        _begin(pair, training=True)
        small, large = torch.ones(1000), torch.ones(100_000)
        for microbatch in range(4):
            _pass_on(pair, small, microbatch).give_back()
        gc.collect()
        before = channel_pair.shared_mappings()
        for microbatch in range(4):
            _pass_on(pair, large, microbatch).give_back()
        gc.collect()
        assert channel_pair.shared_mappings() <= before
