"""One batch's lengths: whose counts, what may have another, how the target is cut, and what is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pypipe.errors import InputError
from pypipe.runtime.batch import offsets
from pypipe.runtime.batch.batch import Batch, ChunkSpecs, Share
from pypipe.runtime.batch.chunk_specs import Replicate, TensorChunkSpec
from pypipe.runtime.batch.loss_options import LossOptions

B = 6
SIZES = [2, 2, 1, 1]  # rows of four microbatches
M = len(SIZES)
PLAIN = ChunkSpecs()
ALONG_1 = ChunkSpecs(args=(TensorChunkSpec(1),))


class Piece(NamedTuple):
    """What one microbatch gets."""

    args: Any
    kwargs: Any
    target: Any


def cut(
    args: Any = (), kwargs: Any = None, target: Any = None, specs: ChunkSpecs = PLAIN, *, later: bool = False
) -> list[Piece]:
    """What the only rank makes of a batch, or a `later` one, which knows its rows from the messages alone."""
    batch = Batch(args, kwargs or {}, target, specs, M, first=not later, training=True)
    shares = [Share(size, B) if later else batch.share(microbatch) for microbatch, size in enumerate(SIZES)]
    return [
        Piece(None if later else batch.args(i), batch.kwargs(i, share), batch.target(i, share))
        for i, share in enumerate(shares)
    ]


def lengths(pieces: Any, dim: int = 0) -> list[int]:
    return [piece.shape[dim] for piece in pieces]


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def with_target(specs: ChunkSpecs, target_spec: Any) -> ChunkSpecs:
    return ChunkSpecs(specs.args, specs.kwargs, target=target_spec)


@pytest.mark.parametrize("later", [False, True], ids=["the only rank", "the last rank"])
class TestTarget:
    """The rank with the target need not have the arguments: it goes by their chunk specs, and both cut alike."""

    def pieces(self, later: bool, target: Any, specs: ChunkSpecs = PLAIN) -> list[Any]:
        x = numbered(2 * B, B) if specs.args else numbered(B, 2)
        kwargs = {"positions": numbered(3, B)} if specs.kwargs and not later else {}
        return [piece.target for piece in cut((x,), kwargs, target, specs, later=later)]

    def test_it_is_cut_along_the_dimension_that_its_spec_says(self, later: bool) -> None:
        target = numbered(2 * B, B)
        pieces = self.pieces(later, target, with_target(ALONG_1, TensorChunkSpec(1)))
        assert [piece.tolist() for piece in pieces] == [part.tolist() for part in target.split(SIZES, 1)]

    def test_its_spec_is_nested_as_it_is(self, later: bool) -> None:
        target = {"words": numbered(3, B), "rows": numbered(B), "all": numbered(5)}
        spec = {"words": TensorChunkSpec(-1), "all": Replicate()}
        pieces = self.pieces(later, target, with_target(PLAIN, spec))
        assert lengths([piece["words"] for piece in pieces], 1) == SIZES
        assert lengths([piece["rows"] for piece in pieces]) == SIZES
        assert all(piece["all"] is target["all"] for piece in pieces)

    def test_a_flattened_one_is_cut_in_proportion(self, later: bool) -> None:
        assert lengths(self.pieces(later, numbered(3 * B))) == [3 * size for size in SIZES]

    @pytest.mark.parametrize(
        "specs",
        [ALONG_1, ChunkSpecs(kwargs={"positions": TensorChunkSpec(1)}), ChunkSpecs(args=(-1,))],
        ids=["args", "kwargs", "from the end"],
    )
    def test_with_arguments_along_another_dimension_none_is_cut_by_guess(self, later: bool, specs: ChunkSpecs) -> None:
        with pytest.raises(InputError) as caught:
            self.pieces(later, numbered(2 * B), specs)
        for word in ["target", "12 rows", "a batch of 6", "target_chunk_spec=TensorChunkSpec(dim)"]:
            assert word in str(caught.value), str(caught.value)
        pieces = self.pieces(later, numbered(2 * B), with_target(specs, 0))
        assert lengths(pieces) == [2 * size for size in SIZES]

    def test_the_message_names_the_dimension_that_fits(self, later: bool) -> None:
        with pytest.raises(InputError, match=r"target_chunk_spec=TensorChunkSpec\(1\)"):
            self.pieces(later, numbered(2 * B, B), ALONG_1)

    def test_one_of_equal_sides_is_refused_since_either_may_be_the_batch(self, later: bool) -> None:
        with pytest.raises(InputError, match=r"target_chunk_spec=TensorChunkSpec\(1\)"):
            self.pieces(later, numbered(B, B), ALONG_1)
        for dim in (0, 1):
            assert lengths(self.pieces(later, numbered(B, B), with_target(ALONG_1, dim)), dim) == SIZES

    def test_one_that_can_only_be_cut_along_dimension_0_needs_no_spec(self, later: bool) -> None:
        for shape in ((B,), (B, 5)):
            assert lengths(self.pieces(later, numbered(*shape), ALONG_1)) == SIZES

    def test_one_of_another_length_is_refused(self, later: bool) -> None:
        with pytest.raises(InputError, match=r"target .*7 rows.* 6.*target_chunk_spec"):
            self.pieces(later, numbered(7))

    def test_values_of_two_lengths_without_specs_are_refused(self, later: bool) -> None:
        with pytest.raises(InputError, match=r"target\[0\] .*12 rows, target\[1\] .*6.*one length"):
            self.pieces(later, (numbered(2 * B), numbered(B)))

    def test_a_spec_that_does_not_fit_is_refused(self, later: bool) -> None:
        with pytest.raises(InputError, match="does not fit target, a Tensor"):
            self.pieces(later, numbered(B), with_target(PLAIN, {"x": 1}))


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_a_value_with_a_spec_of_its_own_is_cut_by_itself_whatever_its_length(later: bool) -> None:
    kwargs = {
        "one": numbered(M),
        "turned": numbered(2, M),
        "double": numbered(2 * B, 1),
        "odd": numbered(7),
        "row": numbered(B),
    }
    specs = ChunkSpecs(kwargs={"one": TensorChunkSpec(0), "turned": TensorChunkSpec(1), "double": 0, "odd": 0})
    pieces = [piece.kwargs for piece in cut((numbered(B, 2),), kwargs, None, specs, later=later)]
    expected = {"one": [1] * M, "double": [2 * size for size in SIZES], "odd": [2, 2, 2, 1], "row": SIZES}
    for name, sizes in expected.items():
        assert lengths([piece[name] for piece in pieces]) == sizes, name
    assert lengths([piece["turned"] for piece in pieces], 1) == [1] * M


@pytest.mark.parametrize(
    ("args", "spec"),
    [
        ((numbered(M), numbered(B)), (0, None)),
        ((numbered(2, M), numbered(B)), (1, None)),
        ((numbered(2 * B), numbered(B)), (0, None)),
        ((numbered(3, B), numbered(2 * B)), (1, 0)),
        ((numbered(M), numbered(B)), (0, 0)),
        ((numbered(B), numbered(2 * B)), (0, 0)),
        ((numbered(3, B), numbered(B)), (1, None)),
    ],
)
def test_the_batchs_length_is_that_of_the_first_value_that_is_not_an_odd_one(args: Any, spec: Any) -> None:
    batch = Batch(args, {}, None, ChunkSpecs(args=spec), M, first=True, training=True)
    assert batch.rows == B
    assert [batch.share(i) for i in range(M)] == [Share(size, B) for size in SIZES]


@pytest.mark.parametrize(
    ("args", "kwargs", "specs", "words"),
    [
        # Only the spec of a value alone makes it an odd one; that of a container says the dimension.
        ((numbered(B), numbered(2 * B)), {}, ChunkSpecs(args=0), ["args[1]", "12", "one length"]),
        # What has no spec has the batch's length, also beside one that is cut along another dimension.
        ((numbered(4, B), numbered(4)), {}, ChunkSpecs(args=(1, None)), ["args[0]", "6 rows", "args[1]", "4"]),
        ((numbered(4, B),), {"m": numbered(4, B)}, ALONG_1, ["kwargs['m']", "dimension 1, which has 6"]),
        # mRoPE's positions are [3, batch, sequence].
        ((numbered(B, 5),), {"p": numbered(3, B, 5)}, PLAIN, ["TensorChunkSpec(1) in kwargs_chunk_spec", "Replicate"]),
        ((numbered(3, B, 5), numbered(B)), {}, PLAIN, ["TensorChunkSpec(1) in args_chunk_spec", "args[0] is to be"]),
        ((numbered(B),), {"x": numbered(2)}, ChunkSpecs(kwargs={"x": 0}), ["kwargs['x']", "2 rows", "too few", "4"]),
        ((numbered(2, 3),), {}, ALONG_1, ["args has 3 rows", "n_microbatches <= 3"]),
    ],
)
def test_what_has_another_length_is_refused_and_the_message_says_which_spec_helps(
    args: Any, kwargs: Any, specs: ChunkSpecs, words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        cut(args, kwargs, None, specs)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"


def test_on_a_later_rank_the_message_names_the_dimension_too() -> None:
    with pytest.raises(InputError, match=r"TensorChunkSpec\(1\) in kwargs_chunk_spec"):
        cut((), {"p": numbered(3, B, 5)}, later=True)


class Meta(NamedTuple):
    cu_seqlens: Tensor
    longest: int


def packed(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.arange(count, dtype=dtype) * 3


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
class TestOffsets:
    """Cumulative offsets: of one sequence more than there are rows, fewer, or as many numbers as rows by accident."""

    @pytest.mark.parametrize("count", [B + 1, 3, B])
    @pytest.mark.parametrize(
        "name", ["cu_seqlens", "cu_seq_lens_q", "cumulative_lengths", "document_offsets", "indptr"]
    )
    def test_they_are_refused(self, later: bool, dtype: torch.dtype, count: int, name: str) -> None:
        with pytest.raises(InputError) as caught:
            cut((numbered(B, 2),), {name: packed(count, dtype)}, later=later)
        for word in [f"kwargs['{name}']", "cumulative offsets (0, 3, 6", f"{count} numbers", "6 rows", "step()"]:
            assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"
        assert "Replicate" not in str(caught.value)

    def test_fields_are_looked_at_by_name_as_well(self, later: bool, dtype: torch.dtype) -> None:
        for tree in ({"meta": Meta(packed(B, dtype), 3)}, {"offsets": [{"of": packed(B, dtype)}]}):
            with pytest.raises(InputError, match="cumulative offsets"):
                cut((numbered(B, 2),), tree, later=later)
        with pytest.raises(InputError, match=r"target\.cu_seqlens .*cumulative offsets"):
            cut((numbered(B, 2),), {}, Meta(packed(B, dtype), 3), later=later)

    def test_ordinary_arguments_are_cut(self, later: bool, dtype: torch.dtype) -> None:
        kwargs = {
            "positions": packed(B, dtype),  # looks like offsets, and is not called so
            "offsets": torch.tensor([0, 4, 2, 6, 8, 9], dtype=dtype),  # falls
            "token_offsets": torch.zeros(B, dtype=dtype),
            "seqlens": torch.tensor([1, 2, 2, 3, 3, 3], dtype=dtype),
            "cu_float": packed(B, dtype).double(),
            "cu_rows": packed(B, dtype)[:, None],
            "focus": packed(B, dtype),
        }
        pieces = [piece.kwargs for piece in cut((numbered(B, 2),), kwargs, later=later)]
        for name, value in kwargs.items():
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), value)
            assert lengths([piece[name] for piece in pieces]) == SIZES

    def test_a_spec_of_their_own_has_them_cut_or_not(self, later: bool, dtype: torch.dtype) -> None:
        specs = ChunkSpecs(kwargs={"cu_seqlens": TensorChunkSpec(0), "offsets": Replicate()})
        kwargs = {"cu_seqlens": packed(B, dtype), "offsets": packed(B + 1, dtype)}
        pieces = [piece.kwargs for piece in cut((numbered(B, 2),), kwargs, None, specs, later=later)]
        assert lengths([piece["cu_seqlens"] for piece in pieces]) == SIZES
        assert all(piece["offsets"] is kwargs["offsets"] for piece in pieces)

    def test_as_the_message_says_a_row_for_each_microbatch_is_the_way(self, later: bool, dtype: torch.dtype) -> None:
        rows = torch.stack([packed(4, dtype) + i for i in range(M)])
        specs = ChunkSpecs(kwargs={"cu_seqlens": TensorChunkSpec(0)})
        pieces = [piece.kwargs for piece in cut((numbered(B, 2),), {"cu_seqlens": rows}, None, specs, later=later)]
        assert [piece["cu_seqlens"][0].tolist() for piece in pieces] == rows.tolist()


def test_positional_offsets_are_known_by_the_stages_name_for_them() -> None:
    with pytest.raises(InputError, match=r"args\[1\] has 6 numbers.*cumulative offsets"):
        cut((numbered(B, 2), packed(B)), specs=ChunkSpecs(names=("x", "cu_seqlens")))
    assert lengths([piece.args[1] for piece in cut((numbered(B, 2), packed(B)), specs=ChunkSpecs(names=("x", "y")))])


def test_with_one_microbatch_nothing_is_cut_so_offsets_go_in_whole() -> None:
    cu_seqlens = packed(B)
    batch = Batch((numbered(B, 2),), {"cu_seqlens": cu_seqlens}, None, PLAIN, 1, first=True, training=True)
    assert batch.kwargs(0, batch.share(0))["cu_seqlens"].tolist() == cu_seqlens.tolist()


def test_values_are_read_once_for_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = ChunkSpecs()
    read: list[Tensor] = []

    def note(tensor: Tensor) -> bool:
        read.append(tensor)
        return False

    monkeypatch.setattr(offsets, "holds_offsets", note)
    for _ in range(3):
        cut((numbered(B, 2),), {"row_offsets": packed(B)}, None, specs)
    assert len(read) == 1


class TestLossOptions:
    @pytest.mark.parametrize(
        "value",
        [
            torch.ones(6),
            torch.ones(6, 1),
            {"nested": [torch.ones(6)]},
            np.ones(6),
            [1.0] * 6,
            torch.nested.nested_tensor([torch.ones(n + 1) for n in range(6)], layout=torch.jagged),
        ],
    )
    def test_what_is_as_long_as_the_batch_needs_a_spec(self, value: Any) -> None:
        options = LossOptions({"weight": value}, None, 3)
        with pytest.raises(InputError, match=r"loss_kwargs\['weight'\].*of 6 rows.*loss_kwargs_chunk_spec=\{'weight'"):
            options.of(0, 6, ())
        whole = LossOptions({"weight": value}, {"weight": Replicate()}, 3)
        assert whole.of(1, 6, ())["weight"] is value
        assert LossOptions({"weight": value}, None, 1).of(0, 6, ())["weight"] is value

    def test_the_dimension_that_arguments_are_cut_along_counts_too(self) -> None:
        options = LossOptions({"weight": torch.ones(5, 6)}, {"absent": TensorChunkSpec(0)}, 3)
        assert options.of(0, 6, ())["weight"].shape == (5, 6)
        with pytest.raises(InputError, match="as long as the batch"):
            LossOptions({"weight": torch.ones(5, 6)}, None, 3).of(0, 6, (1,))
        cut = LossOptions({"weight": torch.ones(5, 6)}, {"weight": TensorChunkSpec(1)}, 3)
        assert cut.of(2, 6, (1,))["weight"].shape == (5, 2)
