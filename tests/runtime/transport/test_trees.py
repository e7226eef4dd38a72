"""Trees survive description, JSON and rebuilding, and what cannot be sent is refused with a place and a remedy."""

from __future__ import annotations

import collections
import enum
import json
import math
import sys
from typing import Any

import channel_pair
import odd_tensors_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pypipe.errors import LayoutError, MismatchError
from pypipe.program import Kind
from pypipe.runtime.transport import trees
from pypipe.runtime.transport.channel import Tag


def round_trip(tree: Any) -> tuple[Any, list[trees.TensorSpec], list[Tensor]]:
    """What the other end of a channel makes of a tree; the specs, and the tensors that were sent."""
    tensors: list[Tensor] = []
    description = trees.describe(tree, tensors)
    text = trees.encode(description)
    assert json.loads(text) is not None
    assert trees.decode(text) == description
    specs = trees.tensor_specs(trees.decode(text))
    arrived = [
        channel_pair.pack_into_fresh_memory(trees.as_sent(tensor, spec.strides), spec)
        for tensor, spec in zip(tensors, specs, strict=True)
    ]
    return trees.rebuild(trees.decode(text), arrived), specs, tensors


def check(tree: Any) -> None:
    got, specs, tensors = round_trip(tree)
    assert not channel_pair.difference(tree, got)
    assert channel_pair.identities(tree) == channel_pair.identities(got)
    for tensor, spec in zip(tensors, specs, strict=True):
        assert spec.requires_grad == tensor.requires_grad
        assert (spec.dtype, spec.shape, spec.numel) == (tensor.dtype, tuple(tensor.shape), tensor.numel())
        assert spec.bytes == tensor.numel() * tensor.element_size()


@settings(max_examples=150, deadline=None)
@given(channel_pair.trees())
def test_any_tree_arrives_as_it_was_sent(tree: Any) -> None:
    check(tree)


@settings(max_examples=200, deadline=None)
@given(channel_pair.tensors(most=5))
def test_any_tensor_keeps_its_values_dtype_strides_and_requires_grad(tensor: Tensor) -> None:
    check(tensor)


@settings(max_examples=60, deadline=None)
@given(channel_pair.trees(channel_pair.scalars()), channel_pair.trees(channel_pair.scalars()))
def test_trees_that_differ_have_descriptions_that_differ(one: Any, other: Any) -> None:
    descriptions = [trees.describe(tree, []) for tree in (one, other)]
    assert (descriptions[0] == descriptions[1]) == (not channel_pair.difference(one, other))


@pytest.mark.parametrize("dtype", channel_pair.DTYPES, ids=str)
def test_tensors_of_every_dtype_arrive(dtype: torch.dtype) -> None:
    raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8)
    tensor = (raw if dtype != torch.bool else raw & 1).view(dtype).view(4, 6)
    check([tensor, tensor.t(), torch.empty(0, 3, dtype=dtype), tensor[1, 2]])


def test_slices_with_gaps_arrive_even_where_torch_cannot_copy_a_dtype() -> None:
    for dtype in sorted(channel_pair.UNCOPYABLE, key=str):
        check(torch.arange(24, dtype=torch.uint8).view(dtype).view(4, 6)[:, ::2])


_IMAGES = torch.randn(2, 3, 4, 5)
_MATRIX = torch.arange(12.0).view(3, 4)
_COMPLEX = torch.randn(3, 4, dtype=torch.complex128)


@pytest.mark.parametrize(
    "tensor",
    [
        _MATRIX.t(),
        _IMAGES.contiguous(memory_format=torch.channels_last),
        _IMAGES.permute(3, 0, 2, 1),
        _MATRIX[:, ::2],
        _MATRIX[:, 1:3].t(),
        _IMAGES.contiguous(memory_format=torch.channels_last)[:, :2],
        _MATRIX[0].expand(5, 4),
        _MATRIX[:, :1].expand(3, 7),
        torch.tensor(2.0).expand(2, 3),
        _MATRIX.as_strided((3, 3), (1, 1)),
        _MATRIX[1:],
        _MATRIX[:, 2],
        _COMPLEX.conj(),
        _COMPLEX.conj().t(),
        _COMPLEX.conj()[:, ::2],
        _COMPLEX.conj().imag,
        _COMPLEX.conj().imag.t(),
        _COMPLEX.real,
        _MATRIX.unflatten(1, (1, 4)).as_strided((3, 1, 4), (4, 999, 1)),
        _MATRIX.t().unsqueeze(1).as_strided((4, 1, 3), (1, 777, 4)),
        torch.empty(0, 5).t(),
        torch.empty_strided((0, 3), (7, 2)),
        torch.tensor(1.5),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda t: f"{tuple(t.shape)}-{t.stride()}-{'conj' if t.is_conj() else ''}{'neg' if t.is_neg() else ''}",
)
def test_layouts_in_memory_arrive_as_documented(tensor: Tensor) -> None:
    check([tensor])


def test_a_tensor_that_torch_keeps_without_memory_is_sent_as_zeros() -> None:
    zeros = torch._efficientzerotensor((3, 2))
    description = trees.describe(zeros, [])
    sent = trees.as_sent(zeros, trees.tensor_specs(description)[0].strides)
    assert sent.data_ptr() != 0, "the core would copy from address 0"
    assert torch.equal(sent, torch.zeros(3, 2))


def test_the_same_tensor_twice_travels_once_and_is_the_same_tensor_on_the_other_side() -> None:
    a, b = torch.randn(3), torch.randn(3)
    tree = {"first": a, "pair": (a, [b, a]), "last": b}
    tensors: list[Tensor] = []
    trees.describe(tree, tensors)
    assert len(tensors) == 2
    got, _, _ = round_trip(tree)
    assert got["first"] is got["pair"][0] is got["pair"][1][1]
    assert got["last"] is got["pair"][1][0]
    assert got["first"] is not got["last"]


@pytest.mark.parametrize(
    "value",
    [
        math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, complex(math.nan, -0.0), complex(-0.0, math.inf),
        True, False, 0, 1, -(2**63), 2**64, 10**300, None, "", "\0", "é漢字🎉", "\ud800", "x\udfffy", '"\\/\n',
        torch.Size([]), torch.Size([0, 3]), torch.float8_e5m2, torch.qint8, (), [], {}, ((),), [[[]]],
        {True: 1, 2: "two", None: None, "": {}, (1, "a"): [()], 1.5: 1, -0.0: 0},
    ],
    ids=ascii,
)  # fmt: skip
def test_values_that_are_no_tensors_arrive_exactly(value: Any) -> None:
    check(value)
    check([value, (value,)])


def test_surrogates_that_would_make_one_character_stay_two() -> None:
    check("\ud83c\udf89")


def test_integers_with_more_digits_than_python_converts_to_text_arrive() -> None:
    check(10 ** (sys.get_int_max_str_digits() + 10))


def test_booleans_numbers_and_dtypes_that_compare_equal_are_different_layouts() -> None:
    values: list[Any] = [1, True, 1.0, 1 + 0j, "1", 0, False, -0.0, 0.0, (1,), [1], torch.Size([1]), None, "None"]
    descriptions = {trees.describe(value, []) for value in values}
    assert len(descriptions) == len(values)


def test_the_order_of_a_dictionary_is_kept() -> None:
    got, _, _ = round_trip({"z": 1, "a": torch.ones(1), 3: torch.zeros(1)})
    assert list(got) == ["z", "a", 3]
    assert got["a"] == 1
    assert got[3] == 0


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


Point = collections.namedtuple("Point", "x y")


class Record(collections.OrderedDict):  # type: ignore[type-arg]
    pass


def _quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: open(__file__), ["TextIOWrapper", "cannot be sent", "tensors, numbers, strings and None"]),  # noqa: SIM115
        (lambda: {1, 2}, ["set", "cannot be sent"]),
        (lambda: Point(torch.ones(1), 2), ["Point", "return tuple(...) of it instead"]),
        (lambda: Record(a=1), ["Record", "return dict(...) of it instead"]),
        (lambda: collections.OrderedDict(a=1), ["OrderedDict", "return dict(...) of it instead"]),
        (lambda: collections.defaultdict(list), ["defaultdict", "return dict(...) of it instead"]),
        (lambda: torch.return_types.max((torch.ones(1), torch.ones(1))), ["max", "return tuple(...) of it instead"]),
        (lambda: Colour.RED, ["Colour", "cannot be sent"]),
        (lambda: Text("a"), ["Text", "cannot be sent"]),
        (lambda: b"bytes", ["bytes", "cannot be sent"]),
        (lambda: torch.device("cpu"), ["device", "cannot be sent"]),
        (lambda: print, ["builtin_function_or_method", "cannot be sent"]),
        (lambda: torch.eye(2).to_sparse(), ["sparse", "(2, 2)", "to_dense()"]),
        (lambda: torch.eye(2).to_sparse_csr(), ["sparse_csr", "(2, 2)", "to_dense()"]),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ["nested", "dense"]),
        (_quantized, ["quantized", "(2,)", "dense"]),
        (lambda: torch.empty(2, 3, device="meta"), ["meta", "(2, 3)"]),
        (lambda: torch.ones(2).as_subclass(odd_tensors_cases.Doubling), ["Doubling", "as_subclass(torch.Tensor)"]),
        (lambda: odd_tensors_cases.Wrapping(torch.ones(2)), ["Wrapping", "return the tensors that it holds"]),
        (lambda: torch.masked.masked_tensor(torch.ones(2), torch.ones(2) > 0), ["MaskedTensor", "that it holds"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_sent_is_refused_with_its_place_and_a_remedy(make: Any, words: list[str]) -> None:
    value = make()
    try:
        for tree, place in (
            ({"a": [torch.ones(1), value]}, "output['a'][1]"),
            ((1, (value,)), "output[1][0]"),
            (value, "output"),
        ):
            with pytest.raises(LayoutError) as caught:
                trees.describe(tree, [])
            message = str(caught.value)
            for word in [place, *words]:
                assert word in message, f"{word!r} is not in {message!r}"
    finally:
        if hasattr(value, "close"):
            value.close()


def test_a_key_that_cannot_be_sent_is_refused_with_its_place() -> None:
    with pytest.raises(LayoutError, match=r"output\['a'\]\[b'k'\] is a builtins.bytes"):
        trees.describe({"a": {b"k": 1}}, [])


def test_a_tensor_as_a_key_is_refused_or_arrives_but_never_harms() -> None:
    # Nobody does this; it must not be silently something else.
    key = torch.ones(1)
    try:
        got, _, _ = round_trip({key: 1})
    except LayoutError:
        return
    assert channel_pair.difference(key, next(iter(got))) == ""


@pytest.mark.parametrize("container", ["list", "dict", "tuple"])
def test_a_cycle_is_refused(container: str) -> None:
    cycle: Any = [1]
    cycle.append({"list": cycle, "dict": {"me": cycle}, "tuple": (cycle, cycle)}[container])
    with pytest.raises(LayoutError, match="cycle"):
        trees.describe({"x": cycle}, [])


def test_depth_up_to_the_limit_is_fine_and_beyond_is_refused() -> None:
    deep: Any = torch.ones(1)
    for _ in range(60):
        deep = (deep,)
    check(deep)
    for _ in range(10):
        deep = [deep]
    with pytest.raises(LayoutError, match="nested more than 64 deep"):
        trees.describe(deep, [])


def test_a_tensor_that_wraps_others_is_refused_with_a_remedy() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(LayoutError, match=r"output\[0\] is a .*\.TwoTensor, .*return the tensors that it holds"):
        trees.describe([TwoTensor(torch.ones(2), torch.ones(2))], [])


def test_tensors_that_share_memory_are_announced() -> None:
    whole = torch.zeros(4, 4)
    tree = {"a": torch.ones(1), "b": [whole, whole[:2]], "c": whole}
    check(tree)
    description = trees.describe(tree, [])
    assert trees.shared_tensors(trees.decode(trees.encode(description))) == (1, 2)
    assert trees.shared_tensors(trees.describe([whole[:2], whole[2:]], [])) == ()
    assert trees.shared_tensors(trees.describe(whole, [])) == ()
    with pytest.raises(MismatchError):
        trees.tensor_specs(("shared", description[1], (0, 3)))


def test_a_tensor_without_memory_is_described_and_not_sent() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    description = trees.describe(fake, [])
    with pytest.raises(LayoutError, match="no values that could be sent"):
        trees.as_sent(fake, trees.tensor_specs(description)[0].strides)


_json = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=3),
        st.sampled_from(
            ["T", "same", "none", "bool", "int", "float", "complex", "str", "dtype", "tuple", "list", "size", "dict",
             "float32", "0x1p3"]
        ),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    max_leaves=12,
)  # fmt: skip


def _believe(text: str) -> None:
    """What a receiver does with a layout that a peer announced."""
    description = trees.decode(text)
    specs = trees.tensor_specs(description)
    if sum(abs(spec.numel) for spec in specs) < 10_000:
        trees.rebuild(description, [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs])


def _only_mismatch(text: str) -> None:
    try:
        _believe(text)
    except MismatchError:
        pass
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {error}, for {text!r}")


@settings(max_examples=200, deadline=None)
@given(_json.map(json.dumps))
def test_json_that_is_no_layout_raises_a_mismatch_and_nothing_else(text: str) -> None:
    _only_mismatch(text)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20))
def test_text_that_is_no_json_raises_a_mismatch_and_nothing_else(text: str) -> None:
    _only_mismatch(text)


@settings(max_examples=100, deadline=None)
@given(channel_pair.trees(most_leaves=4), st.data())
def test_a_damaged_layout_raises_a_mismatch_or_is_another_layout(tree: Any, data: st.DataObject) -> None:
    text = trees.encode(trees.describe(tree, []))
    at = data.draw(st.integers(0, len(text) - 1))
    _only_mismatch(
        text[:at] + data.draw(st.sampled_from(["", "0", "-", '"', "]", "[1]", "null", "1e9"])) + text[at + 1 :]
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "5", "[]", '"T"', "{}", "[[]]", '["T"]', '["T","float32",[2],null]', '["T",3,[2],null,false]',
        '["T","float32",2,null,false]', '["T","float32",[-1],null,false]', '["T","float32",["2"],null,false]',
        '["T","float32",[2.5],null,false]', '["T","float32",[2],[3],false]', '["T","float32",[2],["1"],false]',
        '["T","float32",[2,2],[1],false]', '["T","nonsense",[2],null,false]', '["T","qint8",[2],null,false]',
        '["T","int64",[2],null,true]', '["same",0]', '["same",-1]', '["same","0"]',
        '["tuple",[["T","float32",[1],null,false],["same",-1]]]',
        '["tuple",[["same",0],["T","float32",[1],null,false]]]',
        '["float","nonsense"]', '["float",1.5]', '["complex","0x1p0"]', '["dtype","nonsense"]', '["dtype",["float32"]]',
        '["size",["a"]]', '["size",5]', '["dict",[[1,2]]]', '["dict",[[["list",[]],["none"]]]]', '["dict",5]',
        '["tuple",5]', '["tuple","ab"]', '["unknown",1]', '[["T"],1]', "[" * 100_000, '["tuple",[' * 5_000,
        "1" * 5_000, "NaN", "[NaN]", "[NaN,1]", '["list"]', '["int"]',
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_garbage_raises_a_mismatch(text: str) -> None:
    with pytest.raises(MismatchError):
        _believe(text)


@pytest.mark.parametrize("shape", [(513,), (2**40,), (2**32, 2**32, 16), (10**30,)], ids=str)
def test_a_layout_that_is_larger_than_its_message_is_refused(shape: tuple[int, ...]) -> None:
    # The message's size travels beside the layout; whatever lies behind it is not for this tensor to read.
    with channel_pair.channel_pair() as pair:
        port = pair.sender
        handle = port.announce(trees.encode(("T", "float64", shape, None, False)), [8], 0)
        port.transfer(handle, Tag(0, Kind.F.order, 0, 0, 0), [torch.ones(1, dtype=torch.float64)])
        with pytest.raises(MismatchError):
            pair.receiver.receive(0, training=False)


def test_a_layout_that_is_larger_than_its_message_but_not_than_its_slot_is_refused() -> None:
    with channel_pair.channel_pair() as pair:
        port = pair.sender
        handle = port.announce(trees.encode(("T", "float64", (2,), None, False)), [8], 0)
        port.transfer(handle, Tag(0, Kind.F.order, 0, 0, 0), [torch.ones(1, dtype=torch.float64)])
        with pytest.raises(MismatchError):
            pair.receiver.receive(0, training=False)
