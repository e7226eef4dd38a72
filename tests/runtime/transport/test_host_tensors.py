"""Tensors on the CPU in what a stage on another device returns; the meta device stands for a GPU."""

from __future__ import annotations

import pytest
import torch

from pypipe.errors import LayoutError
from pypipe.runtime.transport import trees
from pypipe.runtime.transport.host_tensors import MOST_BYTES, HostTensor, with_host_tensors

GPU = torch.device("meta")
VALUES = [
    torch.tensor([3, 1, 2]),
    torch.tensor(7),
    torch.empty(0, 4),
    torch.randn(2, 3).T,
    torch.tensor([True, False]),
    torch.randn(3, dtype=torch.bfloat16),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.tensor([float("nan"), -0.0]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.dtype}-{tuple(value.shape)}")
def test_a_small_tensor_on_the_cpu_travels_as_values(value: torch.Tensor) -> None:
    tree = with_host_tensors({"lengths": [value, 5]}, GPU)
    tensors: list[torch.Tensor] = []
    text = trees.encode(trees.describe(tree, tensors))
    assert tensors == []
    (arrived, five) = trees.rebuild(trees.decode(text), [])["lengths"]
    assert five == 5
    assert (arrived.device.type, arrived.dtype, arrived.shape) == ("cpu", value.dtype, value.shape)
    torch.testing.assert_close(arrived, value.resolve_conj(), rtol=0, atol=0, equal_nan=True)
    arrived.zero_()  # its memory is its own


def test_tensors_of_the_stages_device_stay_as_they_are() -> None:
    here = torch.empty(3, device="meta")
    assert with_host_tensors(here, GPU) is here
    assert with_host_tensors((here, {"a": [here]}), GPU) == (here, {"a": [here]})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(MOST_BYTES + 1, dtype=torch.uint8), rf"has {MOST_BYTES + 1} bytes, more than {MOST_BYTES}"),
        (torch.zeros(2, requires_grad=True), "requires gradients"),
    ],
)
def test_what_cannot_travel_as_values_is_refused_with_its_place_and_a_remedy(value: torch.Tensor, said: str) -> None:
    with pytest.raises(LayoutError, match=rf"output\[1\]\['mask'\] is on the CPU and {said}.*return .to\('meta'\)"):
        with_host_tensors((1, {"mask": value}), GPU)


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"runs on cuda:1, but output\[0\] is on meta: give PipelineStage the device"):
        with_host_tensors([torch.empty(3, device="meta")], torch.device("cuda:1"))


def test_a_peers_nonsense_is_an_error() -> None:
    from pypipe.errors import MismatchError

    for values in ("00", "zz"):
        with pytest.raises(MismatchError):
            trees.rebuild(("host", "torch.int64", (3,), values), [])
    assert HostTensor.of(torch.tensor([1])).tensor().tolist() == [1]
