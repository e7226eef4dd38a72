"""What one rank's stages look like, and what they do and do not do in a forward()."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import pytest
import splitting_models
import torch
from splitting_models import WIDTH
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pypipe


def cut(model: nn.Module, at: Any, example: Any, **options: Any) -> list[nn.Module]:
    """The modules of all stages, on one rank."""
    placement = [0] * (len(at) + 1) if isinstance(at, Sequence) else [0, 0]
    return [stage.submod for stage in pypipe.split(model, at, placement=placement, example=example, **options)]


def test_a_stage_has_the_names_of_the_whole_model_and_no_memory_for_the_rest() -> None:
    example = splitting_models.make("chain")
    whole = copy.deepcopy(example.model)
    first, second = cut(example.model, ["blocks.4"], *example.batch(2)[0])
    assert isinstance(first, splitting_models.Chain)
    assert {*first.state_dict()} | {*second.state_dict()} == {*whole.state_dict()}
    assert not {*first.state_dict()} & {*second.state_dict()}
    assert [name for name, _ in second.named_parameters()][-1] == "head.weight"
    blocks: Any = first.blocks
    assert len(blocks) == 8
    assert isinstance(blocks[5], splitting_models.Block)
    weight = blocks[5].qkv.weight
    assert weight.shape == (3 * WIDTH, WIDTH)
    assert weight.untyped_storage().nbytes() == 8
    assert weight.isnan().all()
    second.load_state_dict(whole.state_dict(), strict=False)
    second.eval()
    assert not second.training
    assert not any(module.training for module in second.modules())


def test_a_rank_lets_go_of_other_ranks_weights() -> None:
    model = splitting_models.make("chain").model
    words = torch.ones(2, 3, dtype=torch.int64)
    stages = pypipe.split(model, ["blocks.4"], placement=[0, 0], example=words)
    assert not any(parameter.is_meta for parameter in model.parameters())
    from pypipe.splitting.analysis import find_plan
    from pypipe.splitting.weights import keep_weights

    cuts = [model.get_submodule("blocks.4")]
    plan = find_plan(model, cuts, ["blocks.4"], (words,), {}, None, torch.device("cpu"))
    keep_weights(model, plan, [1], torch.device("cpu"))
    assert {name for name, parameter in model.named_parameters() if not parameter.is_meta} == {
        name for name, _ in stages[1].submod.named_parameters()
    }


def test_what_a_model_from_the_meta_device_still_lacks_is_said_and_shows() -> None:
    with torch.device("meta"):
        model = splitting_models.Chain()
    with pytest.warns(UserWarning, match=r"in no state_dict.*rotary\.frequencies"):
        first, _ = cut(model, ["blocks.4"], torch.ones(2, 3, dtype=torch.int64))
    values = first(torch.ones(2, 3, dtype=torch.int64))[1]
    assert all(value.isnan().all() for value in values)


class Drops(nn.Module):
    """Random numbers in modules, batches' statistics, and what a forward leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Any] = []
        self.latest: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape)
        x = self.norm(self.drop(self.first(x)))
        self.latest = x
        return self.last(x)


def test_the_dry_run_leaves_no_trace() -> None:
    model = Drops()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    cut(model, ["last"], torch.ones(4, WIDTH))
    assert model.seen == []
    assert model.latest is None
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_random_numbers_are_drawn_by_the_stage_that_has_the_module() -> None:
    torch.manual_seed(0)
    model, x = Drops(), torch.ones(4, WIDTH)
    whole = copy.deepcopy(model)
    first, last = cut(model, ["last"], x)
    torch.manual_seed(1)
    expected = whole(x)
    torch.manual_seed(1)
    packet = first(x)
    random = torch.get_rng_state()
    assert torch.equal(last(*packet), expected)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(first.state_dict()["norm.running_mean"], whole.state_dict()["norm.running_mean"])


def test_a_stage_can_be_copied() -> None:
    example = splitting_models.make("biased")
    _, kwargs, _ = example.batch(3)
    stages = cut(example.model, ["blocks.2"], kwargs, output=example.output)
    copies = copy.deepcopy(stages)
    expected = stages[1](*stages[0](**kwargs))
    for parameter in example.model.parameters():
        parameter.data.zero_()
    assert torch.equal(copies[1](*copies[0](**kwargs)), expected)


def test_hooks_on_a_module_run_in_its_stage() -> None:
    example = splitting_models.make("chain")
    ran: list[str] = []
    for name in ("blocks.3", "blocks.3.mlp", "blocks.4"):
        example.model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    args, _, _ = example.batch(2)
    first, second = cut(example.model, ["blocks.4"], args)
    ran.clear()
    packet = first(*args)
    assert ran == ["blocks.3.mlp", "blocks.3"]
    second(*packet)
    assert ran[2:] == ["blocks.4"]


class Again(nn.Module):
    """Computes a block again in the backward; the block has two parts."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = splitting_models.Block()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize(
    ("at", "reentrant", "message"),
    [(["block.mlp"], False, r"within a checkpointed block.*before the block"), (["last"], True, "use_reentrant=False")],
)
def test_a_block_that_could_not_be_computed_again_is_refused(at: list[str], reentrant: bool, message: str) -> None:
    x = torch.ones(2, 3, WIDTH)
    first, _ = cut(Again(reentrant), at, x)
    with pytest.raises(pypipe.ConfigurationError, match=message):
        first(x)


class Skips(nn.Module):
    """Ends early where its input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, flag: bool = False, extra: Any = None) -> Any:
        x = self.first(x)
        return x if flag else self.last(x)


def test_a_batch_that_takes_another_way_than_the_example_is_refused() -> None:
    x = torch.ones(2, WIDTH)
    first, last = cut(Skips(), ["last"], x)
    with pytest.raises(pypipe.ConfigurationError, match=r"stage 0.*ended before.*example"):
        first(x, True)
    with pytest.raises(pypipe.InputError, match=r"argument extra is a object, which cannot be sent"):
        first(x, False, object())
    packet = first(x, extra=object())
    with pytest.raises(pypipe.InputError, match=r"stage 1.*needs extra.*on every rank"):
        last(*packet)
    assert last(*packet, extra=object()).shape == (2, WIDTH)
    assert last(*first(x, False), flag=False).shape == (2, WIDTH)


def test_a_float_input_that_no_later_stage_needs_does_not_travel() -> None:
    x = torch.ones(2, WIDTH)
    first, _ = cut(Skips(), ["last"], x)
    _, values, args, _, _ = first(x)
    assert [value.shape for value in values] == [x.shape]
    assert not any(isinstance(arg, Tensor) for arg in args)


def test_ranks_that_cut_in_different_ways_are_told() -> None:
    example = splitting_models.make("chain")
    args, _, _ = example.batch(2)
    first, _ = cut(copy.deepcopy(example.model), ["blocks.4"], args)
    _, second = cut(example.model, ["blocks.5"], args)
    with pytest.raises(pypipe.ConfigurationError, match=r"stage 1.*cut in another way.*every rank"):
        second(*first(*args))


@pytest.mark.parametrize("what", ["blocks", "stages"])
def test_stages_and_modules_in_them_can_be_compiled(what: str) -> None:
    example = splitting_models.make("chain")
    args, _, _ = example.batch(2)
    whole = copy.deepcopy(example.model)
    first, second = cut(example.model, ["blocks.4"], args)
    if what == "stages":
        first, second = (cast(nn.Module, torch.compile(module, backend="aot_eager")) for module in (first, second))
    else:
        for module, name in ((first, "blocks.3"), (second, "blocks.3"), (second, "blocks.4")):
            module.get_submodule(name).compile(backend="aot_eager")
    for _ in range(2):
        output, expected = second(*first(*args)), whole(*args)
        assert torch.allclose(output, expected, rtol=1e-12, atol=1e-14)
    output.sum().backward()
    expected.sum().backward()
    for name, parameter in whole.named_parameters():
        mine = example.model.get_parameter(name)
        assert mine.grad is not None
        assert parameter.grad is not None
        assert torch.allclose(mine.grad, parameter.grad, rtol=1e-10, atol=1e-12)


class Frozen(nn.Module):
    """Its first part runs without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.last(x)


def test_a_part_may_run_without_a_graph() -> None:
    first, last = cut(Frozen(), ["last"], torch.ones(2, WIDTH))
    packet = first(torch.ones(2, WIDTH))
    assert not packet[1][0].requires_grad
    assert last(*packet).requires_grad


def test_shapes_are_found_once_for_each_kind_of_input() -> None:
    example = splitting_models.make("biased")
    first, last = cut(example.model, ["head"], example.batch(3)[1], output=example.output)
    blocks: Any = last.blocks
    for rows in (3, 4, 3, 4):
        last(*first(**example.batch(rows)[1]))
    assert len(vars(blocks[0])["_interception"]._shapes._known) == 2


def test_the_longest_list_is_cut_where_nothing_is_named() -> None:
    example = splitting_models.make("chain")
    stages = pypipe.split(example.model, placement=[0] * 4, example=example.batch(2)[0])
    assert [stage.stage_index for stage in stages] == [0, 1, 2, 3]
    names = [name for name, _ in stages[1].submod.named_parameters()]
    assert names[0].startswith("blocks.2.")
    assert names[-1].startswith("blocks.3.")


def test_one_stage_is_the_whole_model() -> None:
    example = splitting_models.make("chain")
    args, _, _ = example.batch(2)
    whole = copy.deepcopy(example.model)
    (module,) = cut(example.model, [], args)
    assert torch.equal(module(*args), whole(*args))
