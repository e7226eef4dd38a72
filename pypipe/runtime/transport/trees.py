"""Describes trees of values that cross a stage boundary, as plain data, and rebuilds them.

A *description* is nested tuples of JSON values. It is hashable (a channel looks up its layout by it), it travels as
JSON, and nothing in it is ever executed. The first element of each tuple says what it is::

    ("T", dtype, shape, strides or None, requires_grad)   a tensor; None: contiguous
    ("same", n)                                            the n-th tensor once more
    ("D", T, mesh names or None, mesh shape, placements, shape, strides)
                                                           a DTensor, by its local part
    ("none",) ("bool", b) ("int", i or hex) ("float", hex) ("complex", hex, hex) ("str", s) ("surrogates", hex)
    ("dtype", name)
    ("host", dtype, shape, hex)                            a tensor on the CPU that a stage on a GPU returned
    ("shared", tree, numbers)                              a tree, and which of its tensors share memory at the sender
    ("tuple", items) ("list", items) ("size", ints) ("dict", ((key, value), ...))

Floats travel as hexadecimal text: exact, and NaN and -0.0 are themselves.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pypipe.errors import LayoutError, MismatchError
from pypipe.runtime.tensor_memory import overlapping, settled
from pypipe.runtime.transport.distributed_tensors import Meshes, is_distributed, to_distributed, to_plain
from pypipe.runtime.transport.host_tensors import HostTensor

__all__ = [
    "Description",
    "TensorSpec",
    "decode",
    "describe",
    "encode",
    "outline",
    "rebuild",
    "shared_tensors",
    "tensor_specs",
]

Description = tuple[Any, ...]

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_NAMES: dict[torch.dtype, str] = {value: name for name, value in _DTYPES.items()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # by element size
_MOST_DEPTH = 64


class TensorSpec(NamedTuple):
    """One tensor of a layout."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    requires_grad: bool
    numel: int
    bytes: int


def describe(tree: Any, tensors: list[Tensor]) -> Description:
    """Describes `tree` and appends its tensors, each once, to `tensors`.

    Raises:
        LayoutError: for a value that cannot be sent; the message names its place in the tree.
    """
    if type(tree) is Tensor:  # the common case of one tensor, without bookkeeping
        tensors.append(tree)
        return _describe_tensor(tree, ())
    description = _describe(tree, tensors, {}, ())
    if len(tensors) > 1:
        shared = overlapping(tensors)
        if shared:
            return ("shared", description, shared)
    return description


def outline(description: Description) -> str:
    """Shapes and dtypes of a tree's tensors, in words."""
    specs = tensor_specs(description)
    listed = [f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}" for spec in specs[:6]]
    return ", ".join(listed) + (" ..." if len(specs) > 6 else "") if specs else "no tensors"


def shared_tensors(description: Description) -> tuple[int, ...]:
    """Which tensors of a tree, as it was announced, share memory at the sender; they arrive apart."""
    tag = description[0]
    if tag == "tuple" and description[1]:  # the tree with its checksums
        description = description[1][0]
        tag = description[0]
    if tag != "shared":
        return ()
    shared: tuple[int, ...] = description[2]
    return shared


def _describe(tree: Any, tensors: list[Tensor], seen: dict[int, int], path: tuple[Any, ...]) -> Description:
    kind = type(tree)
    if isinstance(tree, Tensor):
        if is_distributed(tree):
            local, distribution = to_plain(tree, f"output{_place(path)}")
            tensors.append(local)
            return ("D", _describe_tensor(local, path), *distribution)
        number = seen.get(id(tree))
        if number is not None:
            return ("same", number)
        seen[id(tree)] = len(tensors)
        plain = settled(tree)
        tensors.append(plain)
        return _describe_tensor(plain, path)
    if len(path) > _MOST_DEPTH:
        raise LayoutError(f"output{_place(path[:3])}...: nested more than {_MOST_DEPTH} deep (a cycle?)")
    if kind is tuple or kind is list:
        items = tuple(_describe(item, tensors, seen, (*path, i)) for i, item in enumerate(tree))
        return (kind.__name__, items)
    if kind is dict:
        pairs = tuple(
            (_describe(key, tensors, seen, (*path, key)), _describe(value, tensors, seen, (*path, key)))
            for key, value in tree.items()
        )
        return ("dict", pairs)
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        return scalar(tree)
    raise LayoutError(
        f"output{_place(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent to the next stage. "
        "A stage may return tensors, numbers, strings and None, nested in tuples, lists and dicts"
        + (": return dict(...) of it instead" if isinstance(tree, dict) else "")
        + (": return tuple(...) of it instead" if isinstance(tree, tuple) else "")
        + "."
    )


_SCALARS: dict[type, Callable[[Any], Description]] = {
    type(None): lambda value: ("none",),
    bool: lambda value: ("bool", value),
    int: lambda value: ("int", value if abs(value) < 1 << 63 else hex(value)),
    float: lambda value: ("float", value.hex()),
    complex: lambda value: ("complex", value.real.hex(), value.imag.hex()),
    str: lambda value: _describe_text(value),
    torch.Size: lambda value: ("size", tuple(value)),
    torch.dtype: lambda value: ("dtype", _NAMES[value]),
    HostTensor: lambda value: ("host", _NAMES[value.dtype], value.shape, value.values.hex()),
}


def _describe_text(text: str) -> Description:
    if text.isascii():
        return ("str", text)
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates, which JSON would join into characters
        return ("surrogates", text.encode("utf-32-le", "surrogatepass").hex())
    return ("str", text)


def _place(path: Sequence[Any]) -> str:
    return "".join(f"[{part!r}]" for part in path)


def _describe_tensor(tensor: Tensor, path: tuple[Any, ...]) -> Description:
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        if tensor.is_nested:
            what, advice = "nested", "send what it is made of, such as values() and offsets(), or a padded tensor"
        elif tensor.is_meta:
            what, advice = (
                "meta",
                "it has no values: move the stage's parameters and buffers to its device (to_empty())",
            )
        elif tensor.is_quantized:
            what, advice = "quantized", "convert it with dequantize()"
        else:
            what, advice = str(tensor.layout), "convert it with to_dense()"
        raise LayoutError(
            f"output{_place(path)} is a {what} tensor"
            f"{'' if tensor.is_nested else f' of shape {tuple(tensor.shape)}'}; "
            f"only dense (strided) tensors with values can be sent to the next stage: {advice}."
        )
    if type(tensor) is not Tensor:
        _require_known_class(tensor, path)
    shape = tuple(tensor.shape)
    strides = None if tensor.is_contiguous() else _dense_strides(tensor)
    return ("T", _NAMES[tensor.dtype], shape, strides, tensor.requires_grad)


def _require_known_class(tensor: Tensor, path: Sequence[Any]) -> None:
    """Raises LayoutError for a subclass of Tensor: only values travel, so it would arrive without its behaviour."""
    kind = type(tensor)
    if kind is torch.nn.Parameter or _is_fake(tensor):
        return
    wraps = hasattr(tensor, "__tensor_flatten__") or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    raise LayoutError(
        f"output{_place(path)} is a {kind.__module__}.{kind.__qualname__}, "
        + (
            "a tensor that wraps other tensors; return the tensors that it holds instead."
            if wraps
            else "a subclass of torch.Tensor, which would arrive at the next stage as a plain tensor, without its "
            "class and attributes: return tensor.as_subclass(torch.Tensor), and make the object anew in the next stage."
        )
    )


def _is_fake(tensor: Tensor) -> bool:
    """Whether it has a shape and no memory. Stages of one rank may hand it over."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def _dense_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides with which a non-contiguous tensor arrives: its own, made dense, in the same order of dimensions.

    A permuted tensor (channels_last, a transpose) keeps its strides, so view() fails or works downstream as it does
    without a pipeline. One with gaps or overlaps arrives as clone() would make it.
    """
    strides = tuple(tensor.stride())
    if is_dense(tuple(tensor.shape), strides):
        return strides
    clone = torch.empty_like(tensor, device="meta")
    return None if clone.is_contiguous() else tuple(clone.stride())


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill one block of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def as_sent(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """`tensor` itself where its memory is what the description says, else a copy that is. No autograd.

    Raises:
        LayoutError: it has no memory.
    """
    if type(tensor) is not Tensor and _is_fake(tensor):
        raise LayoutError("the output is a FakeTensor, which has no values that could be sent to another rank")
    if tensor.is_complex() and tensor.is_conj():
        tensor = tensor.detach().resolve_conj()
    if tensor.is_neg():
        tensor = tensor.detach().resolve_neg()
    if tensor.data_ptr() == 0 and tensor.numel():  # zeros that torch has not written anywhere
        tensor = tensor.detach().clone()
    if tensor.is_contiguous() if strides is None else tuple(tensor.stride()) == strides:
        return tensor
    # As plain bits: torch cannot copy every dtype it has.
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    if strides is None:
        return bits.contiguous().view(tensor.dtype)
    return torch.empty_strided(bits.shape, strides, dtype=bits.dtype, device=bits.device).copy_(bits).view(tensor.dtype)


def encode(description: Description) -> str:
    """The description as JSON text."""
    return json.dumps(description, separators=(",", ":"))


def decode(text: str) -> Description:
    """The description that `text` holds. Raises MismatchError where it is none."""
    try:
        description: Description = _tupled(json.loads(text))
        return description
    except (ValueError, TypeError, RecursionError) as error:
        raise MismatchError(f"a peer sent a layout that cannot be read: {error}") from error


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, list) else value


_NONSENSE = (
    ValueError,
    TypeError,
    RuntimeError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
    OverflowError,
    StopIteration,
)


def tensor_specs(description: Description) -> list[TensorSpec]:
    """The tensors of a description, in the order in which they are packed. Raises MismatchError on nonsense."""
    specs: list[TensorSpec] = []
    try:
        _collect(description, specs)
    except _NONSENSE as error:
        raise MismatchError(f"a peer sent a layout that makes no sense: {str(description)[:200]}") from error
    return specs


def _collect(description: Description, specs: list[TensorSpec]) -> None:
    tag = description[0]
    if tag == "T":
        _, name, shape, strides, requires_grad = description
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise MismatchError(f"a peer sent dtype {name!r}, which torch {torch.__version__} here does not have")
        if name.startswith("q") or (requires_grad is not False and not (dtype.is_floating_point or dtype.is_complex)):
            raise MismatchError(f"a peer sent an impossible tensor: dtype {name}, requires_grad {requires_grad}")
        sizes = (*shape, *(strides or ()))
        if any(type(size) is not int or not 0 <= size < 1 << 62 for size in sizes) or (
            strides is not None and not is_dense(shape, strides)
        ):
            raise MismatchError(f"a peer sent an impossible tensor: shape {shape}, strides {strides}")
        numel = math.prod(shape)
        specs.append(TensorSpec(dtype, shape, strides, requires_grad, numel, numel * dtype.itemsize))
    elif tag == "D":
        _, local, names, mesh_shape, placements, shape, strides = description
        if local[0] != "T" or len(placements) != len(mesh_shape) or len(strides) != len(shape):
            raise MismatchError(f"a peer sent an impossible DTensor: {str(description)[:200]}")
        if names is not None and not all(type(name) is str for name in names):
            raise TypeError
        _collect(local, specs)
    elif tag == "same":
        if not 0 <= description[1] < len(specs):
            raise IndexError
    elif tag in ("tuple", "list"):
        for item in description[1]:
            _collect(item, specs)
    elif tag == "shared":
        _collect(description[1], specs)
        if not all(type(number) is int and 0 <= number < len(specs) for number in description[2]):
            raise IndexError
    elif tag == "dict":
        for key, value in description[1]:
            _collect(key, specs)
            _collect(value, specs)


def rebuild(description: Description, tensors: Sequence[Tensor], meshes: Meshes | None = None) -> Any:
    """The tree that `description` describes, with these tensors in it.

    Args:
        meshes: where the meshes of DTensors are found.

    Raises:
        MismatchError: the description makes no sense.
        LayoutError: there is no mesh for a DTensor.
    """
    try:
        return _rebuild(description, iter(tensors), tensors, meshes)
    except LayoutError:  # of a mesh; it is a ValueError, too
        raise
    except _NONSENSE as error:
        raise MismatchError(f"a peer sent a layout that makes no sense: {str(description)[:200]}") from error


def _rebuild(description: Description, position: Any, tensors: Sequence[Tensor], meshes: Meshes | None) -> Any:
    tag = description[0]
    if tag == "T":
        return next(position)
    if tag == "D":
        return to_distributed(next(position), description[2:], meshes)
    if tag == "same":
        return tensors[description[1]]
    if tag == "shared":
        return _rebuild(description[1], position, tensors, meshes)
    if tag == "list":
        return [_rebuild(item, position, tensors, meshes) for item in description[1]]
    if tag == "tuple":
        return tuple([_rebuild(item, position, tensors, meshes) for item in description[1]])
    if tag == "dict":
        return {
            _rebuild(key, position, tensors, meshes): _rebuild(value, position, tensors, meshes)
            for key, value in description[1]
        }
    if tag == "none":
        return None
    if tag in ("bool", "int", "str"):
        value = description[1]
        return int(value, 16) if tag == "int" and isinstance(value, str) else value
    if tag == "surrogates":
        return bytes.fromhex(description[1]).decode("utf-32-le", "surrogatepass")
    if tag == "float":
        return float.fromhex(description[1])
    if tag == "complex":
        return complex(float.fromhex(description[1]), float.fromhex(description[2]))
    if tag == "size":
        return torch.Size(description[1])
    if tag == "dtype":
        return _DTYPES[description[1]]
    if tag == "host":
        return HostTensor(_DTYPES[description[1]], description[2], bytes.fromhex(description[3])).tensor()
    raise MismatchError(f"a peer sent a value of unknown kind {tag!r}")
