"""Cutting batches and joining outputs: as torch.tensor_split does, and as torch.distributed.pipelining does it."""

from __future__ import annotations

import math
import operator
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.pipelining import microbatch as peer

from pypipe.errors import InputError
from pypipe.runtime.batch import merging, microbatches
from pypipe.runtime.batch.chunk_specs import Reduce, Replicate, TensorChunkSpec
from pypipe.runtime.batch.microbatches import Cuttable


def same(a: Any, b: Any, where: str = "") -> None:
    """Asserts that two trees are equal, tensors exactly."""
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), f"{where}: {a} and {b}"
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{i}]")
    else:
        assert a is b or a == b, where


def split(tree: Any, spec: Any, n_microbatches: int, name: str, **options: Any) -> list[Any]:
    return list(Cuttable(tree, spec, name).pieces(n_microbatches, **options))


def length(tree: Any, spec: Any, name: str) -> int:
    return Cuttable(tree, spec, name).rows()


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@given(st.integers(1, 200), st.data())
def test_sizes_are_those_of_tensor_split(rows: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, rows))
    expected = [len(chunk) for chunk in torch.tensor_split(torch.empty(rows), count)]
    assert microbatches.sizes(rows, count) == expected
    assert sum(expected) == rows


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(-3, 2), st.lists(st.integers(1, 4), min_size=2, max_size=2), st.data())
def test_a_tensor_is_cut_as_tensor_split_cuts_it_and_merge_restores_it(
    rows: int, dim: int, others: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, rows))
    shape = list(others)
    shape.insert(dim % 3, rows)
    tensor = numbered(*shape)
    chunks = split(tensor, TensorChunkSpec(dim), count, "x")
    same(chunks, list(torch.tensor_split(tensor, count, dim)))
    assert length(tensor, TensorChunkSpec(dim), "x") == rows
    same(merging.merge(chunks, TensorChunkSpec(dim)), tensor)


CASES: list[tuple[tuple[Any, ...], dict[str, Any], Any, Any]] = [
    ((numbered(8, 2),), {}, None, None),
    ((numbered(7, 2), numbered(7)), {}, None, None),
    ((numbered(5, 3), numbered(5, 1, 2)), {"mask": numbered(5)}, None, None),
    ((numbered(6, 2), 3.5, None, "text"), {"flag": True, "x": numbered(6)}, None, None),
    ((numbered(2, 7), numbered(7)), {}, (1, 0), None),
    ((numbered(2, 7), numbered(3, 2, 7)), {"m": numbered(2, 7)}, (1, -1), {"m": 1}),
    ((numbered(6),), {"table": numbered(10, 2), "x": numbered(6)}, (0,), {"table": None, "x": 0}),
    (({"a": numbered(5), "b": [numbered(5, 2), numbered(5, 1)]}, (numbered(5),)), {}, None, None),
    ((numbered(5), {"a": numbered(5), "b": (numbered(5, 2), 7)}), {"k": {"deep": [numbered(5)]}}, None, None),
]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_arguments_are_cut_as_torch_pipelining_cuts_them(case: int, count: int) -> None:
    args, kwargs, dims, kwarg_dims = CASES[case]
    # None marks an argument that is not cut; numbers are dimensions; torch wants a spec for every argument then.
    replicate = peer._Replicate()
    theirs = dims and tuple(peer.TensorChunkSpec(dim) for dim in dims)
    their_kwargs = kwarg_dims and {
        name: replicate if dim is None else peer.TensorChunkSpec(dim) for name, dim in kwarg_dims.items()
    }
    expected_args, expected_kwargs = peer.split_args_kwargs_into_chunks(args, kwargs, count, theirs, their_kwargs)
    mine = dims and TensorChunkSpec.from_tuple(dims)
    my_kwargs = kwarg_dims and {
        name: Replicate() if dim is None else TensorChunkSpec(dim) for name, dim in kwarg_dims.items()
    }
    for specs, kwarg_specs in ((mine, my_kwargs), (theirs, their_kwargs)):  # torch's own objects are taken as well
        same(split(args, specs, count, "args"), expected_args)
        if kwargs:
            same(split(kwargs, kwarg_specs, count, "kwargs"), expected_kwargs)


def test_torchs_replicate_is_taken_as_an_object_and_as_a_class() -> None:
    args, table = (numbered(4), numbered(9, 2)), numbered(9, 2)
    spec: Any
    for spec in (peer._Replicate(), peer._Replicate):
        expected, _ = peer.split_args_kwargs_into_chunks(args, {}, 2, (peer.TensorChunkSpec(0), spec))
        same(split(args, (TensorChunkSpec(0), spec), 2, "args"), expected)
        same(expected[1][1], table)


def test_one_spec_for_all_and_a_number_for_a_spec_work() -> None:
    args = (numbered(2, 6), {"a": numbered(3, 6)})
    expected = [
        (numbered(2, 6)[:, :3], {"a": numbered(3, 6)[:, :3]}),
        (numbered(2, 6)[:, 3:], {"a": numbered(3, 6)[:, 3:]}),
    ]
    for spec in (TensorChunkSpec(1), 1, (1, 1), (TensorChunkSpec(1), {"a": 1}), [1, {"a": -1}]):
        same(split(args, spec, 2, "args"), expected)


def test_a_spec_for_some_keys_leaves_the_others_at_dimension_0() -> None:
    chunks = split({"a": numbered(4), "b": numbered(2, 4)}, {"b": TensorChunkSpec(1)}, 2, "kwargs")
    same(chunks[1], {"a": numbered(4)[2:], "b": numbered(2, 4)[:, 2:]})


def test_tensors_of_no_dimension_and_other_values_go_to_every_microbatch() -> None:
    marker = object()
    chunks = split((numbered(3), torch.tensor(5.0), marker, None), None, 3, "args")
    for i, chunk in enumerate(chunks):
        assert chunk[0].tolist() == [i]
        assert chunk[1].item() == 5.0
        assert chunk[2] is marker
        assert chunk[3] is None
    assert split((marker, torch.tensor(1.0)), None, 4, "args") == [(marker, torch.tensor(1.0))] * 4
    assert length((marker, torch.tensor(1.0)), None, "args") == 0


class Pair(NamedTuple):
    x: Any
    y: Any


def test_named_tuples_keep_their_type() -> None:
    chunks = split((Pair(numbered(4), 1),), None, 2, "args")
    assert type(chunks[0][0]) is Pair
    same(chunks[1][0].x, numbered(4)[2:])
    merged = merging.merge([Pair(numbered(2), numbered(2)), Pair(numbered(3), numbered(1))], None)
    assert type(merged) is Pair
    same(merged.x, torch.cat([numbered(2), numbered(3)]))


def test_the_first_piece_that_is_asked_for_is_made_by_itself_and_each_only_once() -> None:
    pieces = Cuttable((numbered(4), "all"), None, "args").pieces(4)
    assert len(pieces) == 4
    third = pieces[2]
    assert pieces[2] is third
    assert pieces._made is None
    last = pieces[-1]
    assert pieces._made is not None
    assert [chunk[0].item() for chunk in pieces] == [0, 1, 2, 3]
    assert {chunk[1] for chunk in pieces} == {"all"}
    assert (pieces[2] is third, pieces[3] is last) == (True, True)
    assert all(pieces[number] is pieces[number] for number in range(4))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_piece_is_no_view_and_has_a_version_of_its_own(gradients: bool, dim: int) -> None:
    whole = numbered(4, 4).requires_grad_(gradients)
    for (piece,) in split((whole,), TensorChunkSpec(dim), 4, "args"):
        assert not piece._is_view()
        assert piece.requires_grad == gradients
        same_memory = piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert (same_memory, piece._version) == (True, 0)
        with torch.no_grad():
            piece.add_(1)
        assert piece._version == 1
    assert whole._version == 0


def test_gradients_of_the_pieces_reach_the_whole() -> None:
    x = numbered(5, 2).requires_grad_()
    chunks = split((x,), None, 3, "args")
    sum((chunk.sum() * (i + 1) for i, (chunk,) in enumerate(chunks)), torch.zeros(())).backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1, 1, 2, 2, 3]


def test_a_piece_that_is_changed_in_place_leaves_the_other_pieces_backward_alone() -> None:
    chunks = split((numbered(4),), None, 2, "args")
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    kept = (weight * chunks[0][0]).sum()
    chunks[1][0].mul_(2)
    kept.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: split((numbered(3),), None, 4, "args"), ["args has 3 rows", "4 microbatches", "n_microbatches <= 3"]),
        (lambda: split((numbered(0),), None, 1, "args"), ["args has 0 rows", "larger batch"]),
        (
            lambda: Cuttable((1, numbered(4, 2)), None, "args").rows(
                beside=Cuttable({"mask": numbered(3)}, None, "kwargs")
            ),
            ["args[1]", "4 rows", "(4, 2)", "kwargs['mask']", "3", "(3,)", "Replicate()", "kwargs_chunk_spec"],
        ),
        (
            lambda: split({"a": numbered(4), "b": [numbered(5)]}, None, 2, "kwargs"),
            ["kwargs['a']", "4 rows", "kwargs['b'][0]", "5", "Replicate()"],
        ),
        (lambda: split((numbered(4),), (TensorChunkSpec(1),), 2, "args"), ["args[0]", "dimension 1", "(4,)"]),
        (lambda: split((numbered(4),), (TensorChunkSpec(-2),), 2, "args"), ["args[0]", "dimension -2"]),
        (lambda: split((torch.ones(()),), (TensorChunkSpec(0),), 2, "args"), ["args[0]", "0 dimensions"]),
        (lambda: split((numbered(4),), ("rows",), 2, "args"), ["'rows'", "args"]),
        (lambda: split((numbered(4),), (1.5,), 2, "args"), ["1.5", "args"]),
        (lambda: split((numbered(4),), (None, None), 2, "args"), ["2 chunk specs", "args", "1 value"]),
        (
            lambda: split(({"a": numbered(4)},), ({"b": TensorChunkSpec(0)},), 2, "args"),
            ["args[0]['b']", "no such argument"],
        ),
        (lambda: split(([numbered(4)],), ({"a": TensorChunkSpec(0)},), 2, "args"), ["args[0]", "does not fit", "list"]),
        (
            lambda: split({"mask": numbered(4)}, None, 2, "kwargs", batch_rows=6),
            ["kwargs", "4 rows", "6", "same batch"],
        ),
        (lambda: split({"mask": numbered(12)}, None, 2, "kwargs", batch_rows=6), ["kwargs", "12 rows", "6"]),
        (lambda: split(numbered(7), None, 2, "target", batch_rows=6, scaled=True), ["target", "7 rows", "6"]),
        (lambda: split(numbered(3), None, 2, "target", batch_rows=6, scaled=True), ["target", "3 rows", "6"]),
        (lambda: split(numbered(0), None, 2, "target", batch_rows=6, scaled=True), ["target", "0 rows", "6"]),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_argument_and_the_remedy(call: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"


def test_the_remedy_for_too_few_rows_always_works() -> None:
    for rows in range(1, 5):
        with pytest.raises(InputError, match=f"n_microbatches <= {rows} to the schedule"):
            split((numbered(rows),), None, rows + 1, "args")
        assert len(split((numbered(rows),), None, rows, "args")) == rows


@given(st.integers(1, 10), st.integers(1, 5), st.data())
def test_a_flattened_target_is_cut_in_proportion(rows: int, factor: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, rows))
    grid = numbered(rows, factor)
    chunks = split(grid.flatten(), None, count, "target", batch_rows=rows, scaled=True)
    same(chunks, [chunk.flatten() for chunk in torch.tensor_split(grid, count)])


@pytest.mark.parametrize(
    "case", ["tensor", "tuple", "dict", "nested", "dimension", "reduce", "replicate", "loss reducer"]
)
def test_outputs_are_joined_as_torch_pipelining_joins_them(case: str) -> None:
    a, b, c = numbered(2, 3), numbered(3, 3) + 10, numbered(1, 3) - 5
    spec: Any = None
    chunks: list[Any] = [a, b, c]
    match case:
        case "tuple":
            chunks = [(x, x[:, 0]) for x in chunks]
        case "dict":
            chunks = [{"x": x, "y": x + 1} for x in chunks]
        case "nested":
            chunks = [{"x": [x, (x * 2,)], "y": x + 1} for x in chunks]
        case "dimension":
            chunks, spec = [(x.t(), x) for x in chunks], (peer.TensorChunkSpec(1), peer.TensorChunkSpec(0))
        case "reduce":
            reducer = peer._CustomReducer(torch.tensor(1.0, dtype=torch.float64), lambda x, y: x * 2 + y.sum())
            chunks, spec = [(x, x) for x in chunks], (peer.TensorChunkSpec(0), reducer)
        case "loss reducer":
            chunks, spec = [x.sum() for x in chunks], peer.sum_reducer
        case "replicate":
            chunks, spec = [(x, i) for i, x in enumerate(chunks)], (peer.TensorChunkSpec(0), peer._Replicate())
    if case == "replicate":  # torch takes the first one's value for granted; ours is the last one's
        merged = merging.merge(chunks, spec)
        same(merged, (torch.cat([a, b, c]), 2))
        return
    same(merging.merge(chunks, spec), peer.merge_chunks(chunks, spec))


def test_the_own_reducer_folds_in_order() -> None:
    merged = merging.merge(
        [(numbered(1), "a"), (numbered(2), "b"), (numbered(1), "c")], (None, Reduce("", operator.add))
    )
    assert merged[1] == "abc"
    assert merging.merge([3, 4], Reduce(1, lambda a, b: a * 10 + b)) == 134


def test_tensors_of_no_dimension_make_a_vector_and_other_values_are_those_that_all_have() -> None:
    merged = merging.merge([(torch.tensor(1.0), 5, None), (torch.tensor(2.0), 5, None)], None)
    same(merged, (torch.tensor([1.0, 2.0]), 5, None))
    array = np.zeros((2, 3))
    value: object
    for value in (float("nan"), "text", [1, ("a",)], torch.float16, array, {}):
        same(merging.merge([value, value], None), value)
    assert math.isnan(merging.merge([math.nan, float("nan")], None))
    assert merging.merge([array], None) is array


class _NoComparison:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((5, 6), ["the output['x'][1] is a int", "5 and 6"]),
        ((1, 1.0), ["int"]),
        ((True, 1), ["bool"]),
        ((0.25, 0.5), ["float", "0.25 and 0.5", "torch.tensor(...)"]),
        (("a" * 99, "b"), ["str", "'aaa", "..."]),
        ((None, 1), ["NoneType"]),
        ((np.zeros(2), np.zeros(2)), ["numpy.ndarray"]),
        ((types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)), ["SimpleNamespace"]),
        ((_NoComparison(), _NoComparison()), ["_NoComparison"]),
    ],
)
def test_values_that_are_no_tensors_and_differ_are_refused_by_name(values: tuple[Any, Any], words: list[str]) -> None:
    outputs = [{"x": (numbered(1), value)} for value in (values[0], values[0], values[1])]
    with pytest.raises(InputError) as caught:
        merging.merge(outputs, None)
    for word in ["the output['x'][1]", "microbatches 0 and ", "output_merge_spec", "return_outputs=False", *words]:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"
    with pytest.raises(InputError, match="microbatches 0 and 7 have different ones"):
        merging.require_alike(outputs[0], outputs[2], 7, None)
    for spec in (Replicate(), {"x": (None, Replicate())}):
        assert merging.merge(outputs, spec)["x"][1] is values[1]
        merging.require_alike(outputs[0], outputs[2], 2, spec)
    with pytest.raises(InputError, match="microbatches 0 and 2 differ in structure"):
        merging.require_alike(outputs[0], {"x": 1}, 2, None)


def test_a_spec_for_a_part_of_the_output_leaves_the_rest_at_dimension_0() -> None:
    chunks = [{"a": numbered(2, 1), "b": numbered(1, 2)}, {"a": numbered(1, 1), "b": numbered(1, 3)}]
    merged = merging.merge(chunks, {"b": TensorChunkSpec(1)})
    same(
        merged,
        {
            "a": torch.tensor([[0.0], [1.0], [0.0]], dtype=torch.float64),
            "b": torch.tensor([[0.0, 1, 0, 1, 2]], dtype=torch.float64),
        },
    )


def test_a_tuple_of_one_spec_makes_a_tuple_of_an_output_that_is_one_tensor_as_in_torch() -> None:
    same(
        merging.merge([numbered(1, 2), numbered(1, 3)], (TensorChunkSpec(1),)),
        (torch.cat([numbered(1, 2), numbered(1, 3)], 1),),
    )


@pytest.mark.parametrize(
    ("chunks", "spec", "words"),
    [
        ([{"a": numbered(1)}, {"b": numbered(1)}], None, ["microbatches 0 and 1", "structure", "return_outputs=False"]),
        ([(numbered(1),), (numbered(1), numbered(1))], None, ["microbatches 0 and 1"]),
        ([numbered(2, 2), numbered(2, 2)], TensorChunkSpec(2), ["dimension 2", "(2, 2)"]),
        ([(numbered(2), {"a": numbered(2)})] * 2, (None, {"b": 1}), ["['b']"]),
        ([(numbered(2), numbered(2))] * 2, (TensorChunkSpec(0),), ["1 ", "2 "]),
        ([numbered(2, 3), numbered(2, 4)], None, ["(2, 3)", "(2, 4)", "return_outputs=False"]),
        ([numbered(2, 3), numbered(2)], None, ["(2, 3)", "(2,)", "return_outputs=False"]),
        ([torch.tensor(1.0), numbered(2)], None, ["()", "(2,)", "return_outputs=False"]),
        ([numbered(2), numbered(2)], "rows", ["'rows'"]),
        ([numbered(2), numbered(2)], ("rows",), ["'rows'"]),
        ([numbered(2), 5], None, ["microbatches 0 and 1", "return_outputs=False"]),
    ],
)
def test_outputs_that_cannot_be_joined_are_an_error_with_a_remedy(
    chunks: list[Any], spec: Any, words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        merging.merge(chunks, spec)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"


@pytest.mark.parametrize(
    ("output", "spec", "words"),
    [
        (numbered(2, 2), TensorChunkSpec(2), ["dimension 2", "(2, 2)"]),
        (numbered(2, 2), {"x": 0}, ["output"]),
        ((numbered(2), {"a": numbered(2)}), (None, {"b": 1}), ["['b']"]),
        (numbered(2), ("rows",), ["'rows'"]),
    ],
)
def test_a_merge_spec_that_fits_no_output_is_refused_with_the_first_one(
    output: Any, spec: Any, words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        merging.require_mergeable(output, spec)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"


@pytest.mark.parametrize(
    ("output", "spec"),
    [
        (numbered(2, 2), None),
        (numbered(2, 2), TensorChunkSpec(-1)),
        (numbered(2, 2), (TensorChunkSpec(1),)),
        ((torch.tensor(1.0), {"a": numbered(2), "b": 3}), (None, {"a": Replicate()})),
        (torch.tensor(1.0), None),
    ],
)
def test_a_merge_spec_that_fits_is_let_be(output: Any, spec: Any) -> None:
    merging.require_mergeable(output, spec)
    merging.merge([output, output], spec)


ROWS_UNCUT = [
    (lambda: [0.5, 1.5, 2.5, 3.5], "the", ["list of 4 values"]),
    (lambda: ("a", "b", "c", "d"), "the", ["tuple of 4 values", "indices"]),
    (lambda: [[1], [1, 2], [], [3]], "the", ["list of 4 values"]),
    (lambda: [torch.tensor(1.0)] * 4, "the", ["list of 4 values"]),
    (lambda: {"names": {"all": [True, 1, 2.0, 3]}}, "the['names']['all']", ["list of 4 values"]),
    (lambda: np.zeros((4, 2)), "the", ["numpy.ndarray of 4 values"]),
    (lambda: {"x": [1, np.zeros(4)]}, "the['x'][1]", ["numpy.ndarray of 4 values"]),
]


@pytest.mark.parametrize(("make", "place", "words"), ROWS_UNCUT)
def test_rows_of_the_batch_in_what_is_no_tensor_are_refused_by_name(make: Any, place: str, words: list[str]) -> None:
    tree = (numbered(4), make())
    with pytest.raises(InputError) as caught:
        split(tree, None, 2, "target")
    for word in [f"{place.replace('the', 'target[1]', 1)} is a ", *words, "torch.as_tensor", "target_chunk_spec"]:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"
    for piece in split(tree, (None, Replicate()), 2, "target"):
        assert piece[1] is tree[1]
    assert split(tree, None, 1, "target")[0][1] is tree[1]
    if "ndarray" in str(caught.value):
        with pytest.raises(InputError, match=r"kwargs.* is a numpy\.ndarray"):
            split({"x": numbered(4), "it": make()}, None, 2, "kwargs")


def test_values_that_are_no_rows_are_given_to_all() -> None:
    sizes = {
        "x": numbered(4),
        "size": (1, 2, 3, 4),
        "flags": [True] * 4,
        "weights": np.ones(3),
        "number": np.float32(1),
    }
    for piece in split(sizes, None, 2, "kwargs"):
        assert all(piece[name] is sizes[name] for name in list(sizes)[1:])
    for target in (("mean", 0.5, None, 2), [1.0, 2.0, 3.0], "abcd", {"a": 1, "b": 2, "c": 3, "d": 4}):
        assert all(piece[1] is target for piece in split((numbered(4), target), None, 2, "target"))


def test_a_list_or_a_dict_without_tensors_is_the_very_object_so_that_stages_may_fill_it() -> None:
    kwargs: dict[str, Any] = {"x": numbered(4), "seen": [], "notes": {"n": 0}, "deep": {"x": numbered(4), "seen": []}}
    for piece in split(kwargs, None, 2, "kwargs"):
        piece["seen"].append(len(piece["x"]))
        piece["notes"]["n"] += 1
        piece["deep"]["seen"].append(len(piece["x"]))
    assert (kwargs["seen"], kwargs["notes"], kwargs["deep"]["seen"]) == ([2, 2], {"n": 2}, [2, 2])
    assert all(piece is kwargs["notes"] for piece in split(kwargs["notes"], None, 2, "kwargs"))


def test_a_spec_for_a_part_of_a_container_without_tensors_leaves_the_rest_looked_at() -> None:
    tree = {"x": numbered(4), "it": {"a": np.zeros(4), "b": np.zeros(4)}}
    with pytest.raises(InputError, match=r"kwargs\['it'\]\['b'\] is a numpy\.ndarray"):
        split(tree, {"it": {"a": Replicate()}}, 2, "kwargs")
