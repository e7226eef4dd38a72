"""A plan of the halves is made once for all graphs of one structure, and serves no other."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_cases import SPLIT, Doubled, Scaled, Stage, assert_equal, left
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pypipe.runtime.autograd import split_plan
from pypipe.runtime.autograd.split_graph import Graph
from pypipe.runtime.autograd.split_plan import SplitPlan, SplitPlans


class Turn(TypedDict):
    """What a module does next; its input's rows, and whether that needs a gradient."""

    way: str
    row: bool
    frozen: list[bool]
    needs_grad: bool
    rows: int


class Changing(nn.Module):
    """What it does next is told by `turn`: one structure or another, or one structure with other needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8) + 1)
        self.turn: Turn

    def forward(self, x: Tensor) -> Tensor:
        turn = self.turn
        for parameter, frozen in zip(self.parameters(), turn["frozen"], strict=True):
            parameter.requires_grad_(not frozen)
        scale = self.scale * (x[0, 0].detach() if turn["row"] else x.detach())  # a weight alone, or data
        x = self.first(x)
        match turn["way"]:
            case "twice":
                x = self.second(self.second(x).tanh())
            case "checkpoint":
                x = checkpoint(self.second, x, use_reentrant=False)
            case "packed":
                with torch.autograd.graph.save_on_cpu():
                    x = self.second(x)
            case "function":
                x = self.second(Doubled.apply(x))
            case "fused":
                x = Scaled.apply(self.second(x), self.scale)
            case "swapped":
                x = functional.linear(x, self.first.weight, self.second.bias)
            case "plain":
                x = self.second(x)
        return x * scale + x if x.requires_grad or scale.requires_grad else x + torch.zeros(8, requires_grad=True)


WAYS = ["plain", "twice", "checkpoint", "packed", "function", "fused", "swapped"]
TURNS = st.builds(
    Turn,
    way=st.sampled_from(WAYS),
    row=st.booleans(),
    frozen=st.one_of(st.just([False] * 5), st.lists(st.booleans(), min_size=5, max_size=5)),
    needs_grad=st.booleans(),
    rows=st.sampled_from([1, 3]),
)


@contextmanager
def checked_plans() -> Iterator[list[SplitPlan]]:
    """Gives the plans that were made; each plan that is used has to equal the one that would be made."""
    plans: list[SplitPlan] = []
    plan, of = split_plan._plan, SplitPlans.of

    def planned(graph: Graph) -> SplitPlan:
        plans.append(plan(graph))
        return plans[-1]

    def checked(self: SplitPlans, graph: Graph) -> SplitPlan:
        found = of(self, graph)
        assert found == plan(graph)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_plan, "_plan", planned)
        patch.setattr(SplitPlans, "of", checked)
        yield plans


@pytest.fixture
def made() -> Iterator[list[SplitPlan]]:
    with checked_plans() as plans:
        yield plans


@settings(max_examples=40)
@given(st.lists(TURNS, min_size=2, max_size=6))
def test_no_plan_is_used_for_another_graph(turns: list[Turn]) -> None:
    module = Changing().double()
    whole, halves = (Stage(copy.deepcopy(module), needs_grad=True) for _ in range(2))
    with checked_plans(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        works = []
        for turn in turns:
            data = torch.randn(turn["rows"], 3, 8, dtype=torch.float64)
            for stage in (whole, halves):
                stage.module.turn, stage.needs_grad = turn, turn["needs_grad"]
            whole.full(data)
            work = halves.begin(data)
            if work is None:
                continue
            if hasattr(torch._C._autograd.SavedTensor, "unpack_hook"):
                works.append(work)
            else:
                work.run()  # an older torch can't tell a checkpoint, so W recomputes too
        halves.module.requires_grad_()  # else autograd leaves out what was frozen since
        for work in works:
            work.run()
    assert_equal(halves.gradients(), whole.gradients())


@pytest.mark.parametrize("needs_grad", [True, False], ids=["later", "first"])
@pytest.mark.parametrize("name", sorted(SPLIT.keys() - {"experts"}))
def test_microbatches_share_a_plan(name: str, needs_grad: bool, made: list[SplitPlan]) -> None:
    module = SPLIT[name]().double()
    stage = Stage(module, needs_grad=needs_grad)
    for rows in (3, 3, 2):  # the last may be smaller
        left(stage.begin(torch.randn(rows, 5, 8, dtype=torch.float64))).run()
    assert len(made) == 1


def test_a_frozen_weight_makes_a_new_plan(made: list[SplitPlan]) -> None:
    first = nn.Linear(8, 8)
    module = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 8)).double()
    stage = Stage(module, needs_grad=True)
    data = torch.randn(3, 8, dtype=torch.float64)
    for frozen in (False, True, False, True):
        first.weight.requires_grad_(not frozen)
        first.weight.grad = None
        left(stage.begin(data)).run()
        assert (first.weight.grad is None) == frozen
    assert len(made) == 2


def test_plans_are_few(made: list[SplitPlan]) -> None:
    """A structure that never comes again does not stay for ever."""
    plans = SplitPlans()
    stage = Stage(nn.Linear(8, 8).double(), needs_grad=True)
    stage.split._plans = plans
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    for length in range(SplitPlans._most + 2):
        y = stage.module(x)
        for _ in range(length):
            y = y.tanh()
        left(stage.split.begin([y], [torch.ones_like(y)], [x])).run()
    assert sum(map(len, plans._plans.values())) == 2
