"""A plan of the halves is made once for all graphs of one structure, and serves no other."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_cases import SPLIT, Doubled, Scaled, Stage, assert_equal
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pypipe.runtime.autograd import split_plan
from pypipe.runtime.autograd.split_plan import SplitPlans


class Changing(nn.Module):
    """What it does next is told by `turn`: one structure or another, or one structure with other needs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8) + 1)
        self.turn = {}

    def forward(self, x):
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
TURNS = st.fixed_dictionaries(
    {
        "way": st.sampled_from(WAYS),
        "row": st.booleans(),
        "frozen": st.one_of(st.just([False] * 5), st.lists(st.booleans(), min_size=5, max_size=5)),
        "needs_grad": st.booleans(),
        "rows": st.sampled_from([1, 3]),
    }
)


@contextmanager
def checked_plans():
    """Gives the plans that were made; each plan that is used has to equal the one that would be made."""
    plans = []
    plan, of = split_plan._plan, SplitPlans.of

    def planned(graph):
        plans.append(plan(graph))
        return plans[-1]

    def checked(self, graph):
        found = of(self, graph)
        assert found == plan(graph)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_plan, "_plan", planned)
        patch.setattr(SplitPlans, "of", checked)
        yield plans


@pytest.fixture
def made():
    with checked_plans() as plans:
        yield plans


@settings(max_examples=40)
@given(st.lists(TURNS, min_size=2, max_size=6))
def test_no_plan_is_used_for_another_graph(turns):
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
            works.append(halves.begin(data))
            if not hasattr(torch._C._autograd.SavedTensor, "unpack_hook") and works[-1] is not None:
                works.pop().run()  # an older torch can't tell a checkpoint, so W recomputes too
        halves.module.requires_grad_()  # else autograd leaves out what was frozen since
        for work in works:
            if work is not None:
                work.run()
    assert_equal(halves.gradients(), whole.gradients())


@pytest.mark.parametrize("needs_grad", [True, False], ids=["later", "first"])
@pytest.mark.parametrize("name", sorted(SPLIT.keys() - {"experts"}))
def test_microbatches_share_a_plan(name, needs_grad, made):
    module = SPLIT[name]().double()
    stage = Stage(module, needs_grad=needs_grad)
    for rows in (3, 3, 2):  # the last may be smaller
        stage.begin(torch.randn(rows, 5, 8, dtype=torch.float64)).run()
    assert len(made) == 1


def test_a_frozen_weight_makes_a_new_plan(made):
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    stage = Stage(module, needs_grad=True)
    data = torch.randn(3, 8, dtype=torch.float64)
    for frozen in (False, True, False, True):
        module[0].weight.requires_grad_(not frozen)
        module[0].weight.grad = None
        stage.begin(data).run()
        assert (module[0].weight.grad is None) == frozen
    assert len(made) == 2


def test_plans_are_few(made):
    """A structure that never comes again does not stay for ever."""
    plans = SplitPlans()
    stage = Stage(nn.Linear(8, 8).double(), needs_grad=True)
    stage.split._plans = plans
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    for length in range(SplitPlans._most + 2):
        y = stage.module(x)
        for _ in range(length):
            y = y.tanh()
        stage.split.begin([y], [torch.ones_like(y)], [x]).run()
    assert sum(map(len, plans._plans.values())) == 2
