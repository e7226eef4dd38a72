"""I and W give the gradients of a full backward, and compute each once."""

import copy
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from gradients import grad
from hypothesis import given, settings
from hypothesis import strategies as st
from split_cases import SPLIT, InPlace, Stage, assert_equal, both_ways, left
from torch import Tensor

from pypipe.runtime.autograd.engine import run_backward
from pypipe.runtime.autograd.split import SplitBackward


@pytest.mark.parametrize("needs_grad", [True, False], ids=["later", "first"])
@pytest.mark.parametrize("name", SPLIT)
def test_halves_are_the_whole(name: str, needs_grad: bool) -> None:
    whole, halves = both_ways(SPLIT[name], needs_grad=needs_grad)
    assert_equal(halves.gradients, whole.gradients)
    assert not halves.early
    assert not halves.warned
    assert halves.first + halves.second == whole.first


@pytest.mark.parametrize("name", ["mlp", "transformer", "images", "experts", "frozen", "many", "functions"])
def test_bits_are_those_of_a_full_backward(name: str) -> None:
    # Where a weight is used once, and its gradient is one sum.
    whole, halves = both_ways(SPLIT[name], needs_grad=True, dtype=torch.float32)
    for key, gradient in whole.gradients.items():
        other = halves.gradients[key]
        if gradient is None or other is None:
            assert other is gradient, key
        else:
            assert torch.equal(other, gradient), key


def test_a_first_stage_walks_its_chain_in_the_input_half() -> None:
    whole, halves = both_ways(SPLIT["transformer"], needs_grad=False)
    # Of the 16 products with weights, 8 are weight gradients; the lowest layer has no other.
    assert halves.second["mm"] == 8
    assert halves.first["mm"] == whole.first["mm"] - 8
    whole, halves = both_ways(SPLIT["tokens"], needs_grad=False)
    assert halves.second["embedding_dense_backward"] == 1


@pytest.mark.parametrize("needs_grad", [True, False], ids=["later", "first"])
def test_writing_in_place(needs_grad: bool) -> None:
    # A write into a view is one node for the view and its base, whose gradients come together.
    whole, halves = both_ways(InPlace, needs_grad=needs_grad)
    assert_equal(halves.gradients, whole.gradients)
    assert halves.early == ["scale"]
    assert halves.first + halves.second == whole.first


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("name", ["tied", "tokens", "images"])
def test_microbatches_in_flight(name: str, order: tuple[int, ...]) -> None:
    """Three wait for their W while a fourth has a B of its own; gradients add up in any order."""
    torch.manual_seed(1)
    module = SPLIT[name]().double()
    data = [torch.randn(2, 5, 8, dtype=torch.float64) for _ in range(4)]
    whole, halves = (Stage(copy.deepcopy(module), needs_grad=True) for _ in range(2))
    for x in data:
        whole.full(x)
    works = [left(halves.begin(x)) for x in data[:3]]
    works[order[0]].run()
    halves.full(data[3])
    works[order[1]].run()
    works[order[2]].run()
    assert_equal(halves.gradients(), whole.gradients())


def test_weights_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    # W hands weights' gradients on in batches of bounded size; here, one group of weights at a time.
    monkeypatch.setattr("pypipe.runtime.autograd.split._BATCH_BYTES", 1)
    for name in ("tokens", "transformer", "images"):
        whole, halves = both_ways(SPLIT[name], needs_grad=True)
        assert_equal(halves.gradients, whole.gradients)
        assert halves.first + halves.second == whole.first


def test_sparse_gradients() -> None:
    embedding, linear = torch.nn.Embedding(5, 4, sparse=True), torch.nn.Linear(4, 4)
    y = linear(embedding(torch.tensor([1, 3, 3])))
    left(SplitBackward("stage 0").begin([y], [torch.ones_like(y)], [])).run()
    assert grad(embedding.weight).is_sparse
    expected = linear.weight.detach().sum(0) * torch.tensor([0.0, 1, 0, 2, 0])[:, None]
    torch.testing.assert_close(grad(embedding.weight).to_dense(), expected)


def test_stages_that_share_a_weight() -> None:
    torch.manual_seed(2)
    shared = torch.nn.Linear(8, 8).double()
    stages = [torch.nn.Sequential(shared, torch.nn.Tanh()), torch.nn.Sequential(torch.nn.ReLU(), shared)]
    x = torch.randn(4, 8, dtype=torch.float64)
    stages[1](stages[0](x)).sum().backward()
    expected = {name: p.grad for name, p in shared.named_parameters()}
    shared.zero_grad()
    first = stages[0](x)
    received = first.detach().requires_grad_()
    upper = SplitBackward("stage 1").begin([stages[1](received).sum()], [torch.ones((), dtype=x.dtype)], [received])
    lower = SplitBackward("stage 0").begin([first], [grad(received)], [])
    left(lower).run()
    left(upper).run()
    assert_equal({name: p.grad for name, p in shared.named_parameters()}, expected)


def test_weights_alone_and_nothing_to_train() -> None:
    weight, frozen = torch.ones(3, requires_grad=True), torch.ones(3)
    work = SplitBackward("stage 0").begin([weight * 2], [torch.ones(3)], [])
    assert weight.grad is None
    left(work).run()
    assert torch.equal(grad(weight), torch.full((3,), 2.0))
    x = torch.ones(3, requires_grad=True)
    assert SplitBackward("stage 1").begin([x * frozen], [torch.ones(3)], [x]) is None
    assert torch.equal(grad(x), torch.ones(3))


# Of the two values that a step takes.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b.tanh(),
    "mm": lambda a, b: a @ b / 2,
    "t": lambda a, _: a.t(),
    "relu": lambda a, _: a.relu(),
    "rows": lambda a, b: a + b[:1],
    "cat": lambda a, b: torch.cat([a[:2], b[2:]]),
    "norm": lambda a, b: torch.nn.functional.layer_norm(a, (4,), b[0], b[1]),
}
# Stages made at random: each step takes two earlier values (activations, or things made of weights) and makes another.
STEPS = st.lists(
    st.tuples(st.sampled_from(list(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9
)


def built(steps: Sequence[tuple[str, int, int]], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    values = list(values)
    for step, i, j in steps:
        values.append(OPERATIONS[step](values[i % len(values)], values[j % len(values)]))
    return values[-1] * 1, values[len(values) // 2] + values[0]


@settings(max_examples=60)
@given(steps=STEPS, needs_grad=st.booleans())
def test_any_graph(steps: list[tuple[str, int, int]], needs_grad: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    numbers = [torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    found = []
    for split in (False, True):
        x, *weights = [number.clone().requires_grad_() for number in numbers]
        x.requires_grad_(needs_grad)
        roots = [y for y in built(steps, [x, *weights]) if y.requires_grad]
        if not roots:
            return
        gradients = [torch.ones_like(y).cumsum(0) for y in roots]
        if split:
            work = SplitBackward("stage").begin(roots, gradients, [x])
            assert all(weight.grad is None for weight in weights) or work is None
            if work is not None:
                work.run()
        else:
            run_backward(roots, gradients)
        found.append({str(i): leaf.grad for i, leaf in enumerate([x, *weights])})
    assert_equal(found[1], found[0])
