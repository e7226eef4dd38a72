"""Each kind of value in a batch: how it is cut, what of it stays whole, and what is refused by name."""

from __future__ import annotations

import collections
import dataclasses
import functools
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from pypipe.errors import InputError
from pypipe.runtime.batch import leaves, merging
from pypipe.runtime.batch.chunk_specs import Replicate, TensorChunkSpec
from pypipe.runtime.batch.microbatches import Cuttable, sizes

ROWS = 5


def split(tree: Any, spec: Any = None, count: int = 2, **options: Any) -> list[Any]:
    return list(Cuttable(tree, spec, "kwargs").pieces(count, **options))


def rows(*shape: int) -> Tensor:
    return torch.arange(torch.Size((ROWS, *shape)).numel(), dtype=torch.float64).view(ROWS, *shape)


def mask(n_rows: int, heads: int | None = None, start: int = 0, size: int = 16) -> BlockMask:
    """Row b lets a query see b + 1 keys and those of the first block; from row `start` on."""

    def few(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() <= b + start + 2 * h

    return create_block_mask(few, n_rows, heads, 64, 64, device="cpu", BLOCK_SIZE=size)


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_block_mask_is_cut_to_the_masks_of_its_rows(count: int, heads: int | None) -> None:
    start = 0
    for piece, size in zip(split({"m": mask(ROWS, heads)}, count=count), sizes(ROWS, count), strict=True):
        found, expected = piece["m"], mask(size, heads, start)
        assert type(found) is BlockMask
        assert found.shape == expected.shape
        assert torch.equal(found.to_dense(), expected.to_dense())
        for name, value in vars(expected).items():
            assert (getattr(found, name) is None) == (value is None), name
            if "num_blocks" in name and value is not None:
                assert torch.equal(getattr(found, name), value), name
            elif isinstance(value, Tensor):
                assert getattr(found, name).shape == value.shape, name
        b, h, q, k = torch.meshgrid(
            torch.arange(size), torch.arange(heads or 1), torch.arange(64), torch.arange(64), indexing="ij"
        )
        assert torch.equal(found.mask_mod(b, h, q, k), expected.mask_mod(b, h, q, k))
        start += size


def test_attention_with_the_pieces_of_a_block_mask_is_that_with_the_whole() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    whole, x = mask(ROWS), torch.randn(ROWS, 1, 64, 8, dtype=torch.float64)
    expected = flex_attention(x, x, x, block_mask=whole)
    found = [flex_attention(*(p["x"],) * 3, block_mask=p["m"]) for p in split({"x": x, "m": whole})]
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-12)


def test_the_mask_mod_of_a_piece_keeps_the_dtype_of_its_indices() -> None:
    whole = mask(ROWS)
    whole.mask_mod = lambda b, h, q, k: b
    for dtype in (torch.int32, torch.int64):
        pieces = [p["m"].mask_mod(torch.arange(2, dtype=dtype), 0, 0, 0) for p in split({"m": whole})]
        assert [piece.tolist() for piece in pieces] == [[0, 1], [3, 4]]
        assert {piece.dtype for piece in pieces} == {dtype}


def test_a_block_mask_of_one_row_keeps_its_blocks_and_is_asked_for_the_batchs_rows() -> None:
    whole = mask(1)
    whole.mask_mod = lambda b, h, q, k: b
    first, second = split({"m": whole, "x": rows()})
    for piece in (first["m"], second["m"]):
        assert piece.kv_indices is whole.kv_indices
        assert piece.q_indices is whole.q_indices
    assert [piece["m"].mask_mod(torch.arange(2), 0, 0, 0).tolist() for piece in (first, second)] == [[0, 1], [3, 4]]
    assert split({"m": whole}, batch_rows=ROWS)[1]["m"].mask_mod(torch.arange(2), 0, 0, 0).tolist() == [3, 4]
    # Where the batch has no rows, where there is one microbatch, and where the user says so: the object itself.
    assert split({"m": whole})[1]["m"] is whole
    assert split({"m": whole, "x": rows()}, count=1)[0]["m"] is whole
    assert split({"m": whole, "x": rows()}, {"m": Replicate()})[1]["m"] is whole


def test_a_block_mask_is_not_cut_where_replicate_says_so_and_not_along_another_dimension() -> None:
    whole = mask(ROWS)
    assert split({"m": whole, "x": rows()}, {"m": Replicate()})[1]["m"] is whole
    with pytest.raises(InputError, match=r"kwargs\['m'\] is a BlockMask, .* dimension 0 .* says 1"):
        split({"m": whole}, {"m": TensorChunkSpec(1)})
    with pytest.raises(InputError, match=r"kwargs\['x'\] .* 5 rows, kwargs\['m'\] \(a BlockMask of shape \(4, .* 4:"):
        split({"x": rows(), "m": mask(4)})


def test_importing_pypipe_does_not_import_flex_attention() -> None:
    code = (
        "import sys, torch; known = set(sys.modules); import pypipe.schedules; "
        "print([name for name in set(sys.modules) - known if 'flex' in name or 'device_mesh' in name])"
    )
    # -P: not from the clone, whose pypipe has no core.
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def components() -> list[Tensor]:
    return [torch.full((1 + i % 3, 2), float(i), dtype=torch.float64) for i in range(ROWS)]


def unbound(tensor: Tensor) -> list[list[list[float]]]:
    return [component.tolist() for component in tensor.unbind()]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_nested_tensor_is_cut_by_its_components(layout: torch.layout, count: int) -> None:
    whole = torch.nested.nested_tensor(components(), layout=layout)
    expected = [component.tolist() for component in components()]
    for pieces in (split((whole, rows()), count=count), [split((whole,), count=count)[i] for i in range(count)]):
        assert [piece[0].layout for piece in pieces] == [layout] * count
        assert [len(piece[0].unbind()) for piece in pieces] == sizes(ROWS, count)
        assert [row for piece in pieces for row in unbound(piece[0])] == expected
    merged = merging.merge([piece[0] for piece in split((whole,), count=count)], None)
    assert (merged.layout, unbound(merged)) == (layout, expected)


def test_pieces_of_nested_tensors_with_the_same_offsets_can_be_added_whatever_they_belong_to() -> None:
    whole = torch.nested.nested_tensor(components(), layout=torch.jagged)
    args = split((whole, whole * 2))
    target = Cuttable(whole * 3, None, "target").pieces(2, batch_rows=ROWS, scaled=True)
    total = args[0][0] + args[0][1] + target[0]
    assert unbound(total) == [(component * 6).tolist() for component in components()[:3]]
    del args, target, total, whole
    assert len(leaves._offsets) == 0  # nothing is kept


def test_transposed_nested_tensors_and_ones_with_holes_are_cut_right() -> None:
    whole = torch.nested.nested_tensor(components(), layout=torch.jagged)
    turned = split((whole.transpose(1, 2),))
    assert [row for piece in turned for row in unbound(piece[0])] == [part.t().tolist() for part in components()]
    starts, lengths = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([1, 2, 3, 4, 5])
    holes = torch.nested.narrow(rows(6), 1, starts, lengths, layout=torch.jagged)
    expected = unbound(holes)
    assert [row for piece in split((holes,)) for row in unbound(piece[0])] == expected


def test_nested_tensors_that_cannot_be_cut_are_refused_by_name() -> None:
    whole = torch.nested.nested_tensor(components(), layout=torch.jagged)
    with pytest.raises(InputError, match=r"kwargs\['n'\] is a nested tensor, .* dimension 0 .* says 2"):
        split({"n": whole}, {"n": 2})
    with pytest.raises(InputError, match=r"kwargs\['n'\] \(a nested tensor of 5 components\) .* 5 .* 4"):
        split({"n": whole}, batch_rows=4)
    whole = torch.nested.nested_tensor(components(), layout=torch.jagged, requires_grad=True)
    with pytest.raises(InputError, match=r"kwargs\['n'\] .* requires a gradient.* detach"):
        Cuttable({"n": whole}, None, "kwargs").replace(lambda tensor: tensor)


@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr], ids=["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_is_refused_by_name(sparse: Callable[[Tensor], Tensor]) -> None:
    whole = sparse(rows(2))
    with pytest.raises(InputError, match=r"kwargs\['s'\] is a tensor of layout .*to_dense"):
        split({"s": whole})
    assert split({"s": whole}, {"s": Replicate()})[1]["s"] is whole


class Pair(NamedTuple):
    x: Any
    n: int


T = TypeVar("T")


@dataclasses.dataclass
class Plain(Generic[T]):
    x: T
    n: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    more: Any = None
    counted: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass
class Doubled:
    """Changes what it is given: to make it once more would do that twice."""

    x: Any
    once: dataclasses.InitVar[int] = 2

    def __post_init__(self, once: int) -> None:
        self.x = self.x * once
        self.beside = self.x + 1  # no field

    @functools.cached_property
    def total(self) -> float:
        return float(self.x.sum())


class Attributes(dict[str, Any]):
    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args, **items)
        self.__dict__ = self


class Ordered(collections.OrderedDict[str, Any]):
    pass


class Marked(list[Any]):
    mark = "none"


def test_a_dataclass_is_cut_field_by_field() -> None:
    first, second = split({"d": Plain(rows(2))})
    assert type(second["d"]) is Plain
    assert (second["d"].x.tolist(), second["d"].n) == (rows(2)[3:].tolist(), 3)
    whole = Frozen(rows(), {"deep": [Plain(rows(1))]})
    object.__setattr__(whole, "counted", rows() + 1)
    _, cut = split((whole,))
    assert type(cut[0]) is Frozen
    assert cut[0].x.tolist() == [3, 4]
    assert cut[0].counted.tolist() == [4, 5]
    assert cut[0].more["deep"][0].x.tolist() == [[3], [4]]
    assert (whole.x.tolist(), first["d"].x.tolist()) == ([0, 1, 2, 3, 4], rows(2)[:3].tolist())


def test_a_dataclass_is_copied_as_it_is_and_what_it_has_computed_is_forgotten() -> None:
    whole = Doubled(rows())
    assert whole.total == 20
    _, piece = split((whole,))
    assert piece[0].x.tolist() == [6, 8]  # doubled once
    assert piece[0].beside.tolist() == [7, 9]
    assert piece[0].total == 14
    assert whole.total == 20


def test_dicts_and_lists_of_their_own_kind_keep_it() -> None:
    piece: Any
    _, piece = split({"d": Attributes(x=rows(), n=1)})
    assert type(piece["d"]) is Attributes
    assert (piece["d"].x.tolist(), piece["d"]["x"].tolist(), piece["d"].n) == ([3, 4], [3, 4], 1)  # type: ignore[attr-defined]
    _, piece = split({"d": Ordered(x=rows())})
    assert (type(piece["d"]), piece["d"]["x"].tolist()) == (Ordered, [3, 4])
    default: collections.defaultdict[str, Any] = collections.defaultdict(list, {"x": rows()})
    _, piece = split({"d": default})
    assert (type(piece["d"]), piece["d"]["x"].tolist(), piece["d"]["y"]) == (collections.defaultdict, [3, 4], [])
    marked = Marked([rows()])
    marked.mark = "mine"
    _, piece = split((marked, {rows()}, frozenset([rows()]), collections.deque([rows()], 3)))
    assert (type(piece[0]), piece[0].mark, piece[0][0].tolist()) == (Marked, "mine", [3, 4])
    assert [type(value) for value in piece[1:]] == [set, frozenset, collections.deque]
    assert [value.pop().tolist() for value in (piece[1], set(piece[2]), piece[3])] == [[3, 4]] * 3


def test_what_holds_nothing_that_is_cut_is_given_as_the_object_itself() -> None:
    module, config, plain = nn.Linear(2, 2), types.SimpleNamespace(a=1, deep=[{"b": 2}]), Plain(5)
    whole = {
        "module": module,
        "config": config,
        "plain": plain,
        "attributes": Attributes(a=torch.tensor(1.0)),
        "function": lambda s, b: s * config.a,
        "method": module.forward,
        "optimizer": torch.optim.SGD(module.parameters()),
        "scalar": types.SimpleNamespace(t=torch.tensor(2.0)),
        "marked": Marked([1]),
    }
    for piece in split({**whole, "x": rows()}):
        for name, value in whole.items():
            assert piece[name] is value or name == "method", name


class Cache:
    """Three levels: an object, its list, an object in it."""

    def __init__(self, value: Any) -> None:
        self.layers = [types.SimpleNamespace(keys=value)]


class Slots:
    __slots__ = ("__hidden", "unset")

    def __init__(self, value: Any) -> None:
        self.__hidden = value

    def method(self) -> None:
        """Bound to an object that holds a tensor."""


class TakesTwo(dict[str, Any]):
    def __init__(self, items: Any, other: Any) -> None:
        super().__init__(items)


def _closure(x: Any) -> Any:
    return lambda score, b: score + x[b]


def _with_attribute() -> Any:
    marked = Marked([1])
    marked.x = rows()  # type: ignore[attr-defined]
    return marked


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (types.SimpleNamespace(x=rows()), ["types.SimpleNamespace", ".x)"]),
        (Cache(rows()), ["Cache", ".layers[0].keys"]),
        (Slots(rows()), ["Slots", "_Slots__hidden"]),
        (_closure(rows()), ["function", "variable x"]),
        (_closure({"a": (rows(),)}), ["function", "variable x"]),
        (functools.partial(torch.add, rows()), ["functools.partial", ".args[0]"]),
        (functools.partial(torch.add, other=rows()), ["functools.partial", ".keywords['other']"]),
        (Slots(rows()).method, ["method", ".__self__._Slots__hidden"]),
        (collections.UserDict(x=rows()), ["UserDict", ".data['x']"]),
        (types.MappingProxyType({"x": rows()}), ["mappingproxy", "['x']"]),
        (types.SimpleNamespace(m=mask(ROWS)), ["types.SimpleNamespace", ".m.kv_num_blocks"]),
        (_with_attribute(), ["Marked", "attributes", "['x']"]),
        (TakesTwo({"x": rows()}, 1), ["TakesTwo", "TypeError"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_that_holds_tensors_and_cannot_be_cut_is_refused_by_name(value: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        split({"x": rows(), "it": value})
    for word in ["kwargs['it']", "Replicate()", *words]:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"
    whole = split({"x": rows(), "it": value}, {"it": Replicate()})
    assert [piece["it"] is value for piece in whole] == [True, True]


def test_objects_that_hold_each_other_and_large_ones_are_looked_through_in_no_time() -> None:
    a, b = types.SimpleNamespace(), types.SimpleNamespace()
    a.other, b.other = b, a
    many = types.SimpleNamespace(numbers=list(range(10**6)))
    _, piece = split({"a": a, "many": many, "x": rows()})
    assert (piece["a"] is a, piece["many"] is many) == (True, True)


def test_specs_are_given_by_field() -> None:
    whole = {"pair": Pair(rows(), 1), "plain": Plain(rows(3).mT), "list": [rows(), rows()]}
    for spec in (
        {"plain": {"x": TensorChunkSpec(-1)}, "pair": Pair(TensorChunkSpec(0), None)},  # type: ignore[arg-type]
        {"plain": Plain(TensorChunkSpec(1), None), "pair": {"x": 0}, "list": [None, 0]},  # type: ignore[arg-type]
    ):
        _, piece = split(whole, spec)
        assert (piece["pair"].x.tolist(), piece["plain"].x.shape) == ([3, 4], (3, 2))
        assert [value.tolist() for value in piece["list"]] == [[3, 4]] * 2
    with pytest.raises(InputError, match=r"kwargs\['plain'\]\.y, but no such argument"):
        split(whole, {"plain": {"y": 0}})
    with pytest.raises(InputError, match=r"3 chunk specs for kwargs\['list'\], which has 2 values"):
        split(whole, {"list": [0, 0, 0]})


def test_outputs_in_dataclasses_and_dicts_of_their_own_kind_are_joined_leaf_by_leaf() -> None:
    joined = merging.merge([Plain(rows()[:2], 2), Plain(rows()[2:], 2)], None)
    assert (type(joined), joined.x.tolist(), joined.n) == (Plain, [0, 1, 2, 3, 4], 2)
    joined = merging.merge([Attributes(x=rows(1)[:2].mT), Attributes(x=rows(1)[2:].mT)], {"x": TensorChunkSpec(1)})
    assert (joined.x.tolist(), joined["x"].shape) == ([[0, 1, 2, 3, 4]], (1, ROWS))
    plain = Plain(1)
    assert merging.merge([Plain(1), plain], None) is plain
    assert merging.merge([Plain(0), plain], Replicate()) is plain
    with pytest.raises(InputError, match=r"the output is a .*Plain, .* microbatches 0 and 1 have different ones"):
        merging.merge([Plain(0), plain], None)
    with pytest.raises(InputError, match="microbatches 0 and 1 differ in structure"):
        merging.merge([Plain(rows()), Pair(rows(), 1)], None)
    with pytest.raises(InputError, match="a TakesTwo cannot be made again"):
        merging.merge([TakesTwo({"x": rows()}, 1)] * 2, None)
