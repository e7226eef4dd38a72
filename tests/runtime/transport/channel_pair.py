"""Random trees, exact comparison of trees, and channels over the core between two hubs of this process."""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
import socket
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pypipe import _core
from pypipe.program import Kind
from pypipe.runtime.transport.channel import ReceiveChannel, SendChannel
from pypipe.runtime.transport.links.shm import ShmReceiveChannel, ShmSendChannel
from pypipe.runtime.transport.trees import TensorSpec

WAIT_POLICY = _core.WaitPolicy(20.0, 100)

_ALL = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# A quantized dtype needs a scale, so its tensors cannot be sent; torch has no copy kernel for integers of odd widths.
DTYPES = sorted((dtype for dtype in _ALL if not str(dtype).startswith("torch.q")), key=str)
DTYPES = [dtype for dtype in DTYPES if not str(dtype).startswith("torch.quint")]
UNCOPYABLE = frozenset(dtype for dtype in DTYPES if re.fullmatch(r"torch\.u?int[1-7]", str(dtype)))


def contents(tensor: Tensor) -> bytes:
    """The values of a tensor in row-major order, as bytes; works for every dtype that memory can hold."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    tensor = tensor.resolve_neg()
    if tensor.numel() == 0:
        return b""
    width = tensor.element_size()
    storage = (ctypes.c_char * tensor.untyped_storage().nbytes()).from_address(tensor.untyped_storage().data_ptr())
    raw = torch.frombuffer(bytearray(storage), dtype=torch.uint8)
    shape, strides = (*tensor.shape, width), (*(stride * width for stride in tensor.stride()), 1)
    return raw.as_strided(shape, strides, tensor.storage_offset() * width).contiguous().numpy().tobytes()


def strides_that_matter(tensor: Tensor) -> tuple[int, ...]:
    """Strides of dimensions of one element say nothing."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)


def expected_strides(tensor: Tensor) -> tuple[int, ...]:
    """As trees.py says: a permuted tensor keeps its strides, one with gaps or overlaps gets those of its clone()."""
    if tensor.is_contiguous():
        return strides_that_matter(torch.empty(tensor.shape, device="meta"))
    order = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    dense = all(stride == math.prod(size for _, size in order[:i]) for i, (stride, _) in enumerate(order))
    if dense:
        return strides_that_matter(tensor)
    # torch cannot clone every dtype that it has; strides do not depend on it.
    return strides_that_matter(torch.empty_strided(tensor.shape, tensor.stride(), device="meta").clone())


def tensor_difference(sent: Tensor, got: Any) -> str:
    """What differs between a tensor and what arrived, or nothing."""
    if type(got) is not Tensor:
        return f"a tensor became a {type(got).__name__}"
    if got.dtype != sent.dtype or got.shape != sent.shape:
        return f"{sent.dtype} {tuple(sent.shape)} became {got.dtype} {tuple(got.shape)}"
    if strides_that_matter(got) != expected_strides(sent):
        return f"strides {sent.stride()} of shape {tuple(sent.shape)} became {got.stride()}"
    if contents(got) != contents(sent):
        return f"values of a {sent.dtype} tensor of shape {tuple(sent.shape)}, strides {sent.stride()} changed"
    return ""


def difference(sent: Any, got: Any, where: str = "") -> str:
    """What differs between a tree and what arrived, or nothing."""
    if isinstance(sent, Tensor):
        text = tensor_difference(sent, got)
        return f"{where}: {text}" if text else ""
    if type(sent) is not type(got):
        return f"{where}: a {type(sent).__name__} became a {type(got).__name__}"
    if type(sent) in (tuple, list):
        if len(sent) != len(got):
            return f"{where}: {len(sent)} items became {len(got)}"
        return next(
            filter(None, (difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(sent, got, strict=True)))),
            "",
        )
    if type(sent) is dict:
        pairs = zip(sent.items(), got.items(), strict=False)
        if len(sent) != len(got):
            return f"{where}: {len(sent)} keys became {len(got)}"
        for (key, value), (other_key, other_value) in pairs:
            text = difference(key, other_key, f"{where} key") or difference(value, other_value, f"{where}[{key!r}]")
            if text:
                return text
        return ""
    if type(sent) is float:
        same = sent.hex() == got.hex()
    elif type(sent) is complex:
        same = sent.real.hex() == got.real.hex() and sent.imag.hex() == got.imag.hex()
    else:
        same = sent == got
    return "" if same else f"{where}: {sent!r} became {got!r}"


def identities(tree: Any) -> list[int]:
    """For each place of a tensor in a tree, the number of the first place that has the same tensor."""
    seen: dict[int, int] = {}
    found: list[int] = []

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append(seen.setdefault(id(value), len(found)))
        elif isinstance(value, (tuple, list)):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)

    walk(tree)
    return found


def pack_into_fresh_memory(sent: Tensor, spec: TensorSpec) -> Tensor:
    """What a channel does with a tensor, without the channel."""
    if spec.numel == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    flat = torch.frombuffer(bytearray(ctypes.string_at(sent.data_ptr(), spec.bytes)), dtype=spec.dtype)
    return flat.view(spec.shape) if spec.strides is None else flat.as_strided(spec.shape, spec.strides)


@st.composite
def tensors(draw: st.DrawFn, most: int = 4) -> Tensor:
    """Tensors of every dtype; 0-d, empty, transposed, channels_last, with gaps, expanded, negated, conjugated."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, most), max_size=4))
    count = math.prod(shape)
    seed = draw(st.integers(0, 255))
    raw = (torch.arange(count * dtype.itemsize) * 37 + seed).to(torch.uint8)
    raw = raw if dtype != torch.bool else raw & 1
    tensor = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    ways = ["plain", "permuted"]
    if dtype not in UNCOPYABLE:
        ways += ["gaps", "expanded", "strided", "offset"]
        ways += ["conjugate", "negative"] if dtype in (torch.complex64, torch.complex128) else []
        ways += ["channels_last"] if len(shape) == 4 else []
    way = draw(st.sampled_from(ways))
    if way == "permuted":
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    elif way == "gaps" and shape:
        tensor = tensor[..., :: draw(st.integers(2, 3))]
    elif way == "expanded":
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *shape)
    elif way == "strided" and count:
        tensor = tensor.as_strided(shape, [draw(st.integers(0, 1)) for _ in shape]) if count >= sum(shape) else tensor
    elif way == "offset" and shape and shape[0] > 1:
        tensor = tensor[1:]
    elif way == "conjugate":
        tensor = tensor.mT.conj() if len(shape) >= 2 else tensor.conj()
    elif way == "negative":
        tensor = tensor.conj().imag
    elif way == "channels_last":
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    if (dtype.is_floating_point or dtype.is_complex) and draw(st.booleans()):
        tensor = tensor.detach().requires_grad_()
    return tensor


def _numbers() -> st.SearchStrategy[Any]:
    big = st.integers(-(2**200), 2**200)
    special = st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 0.0, 5e-324, 1.7976931348623157e308])
    return st.one_of(st.booleans(), st.integers(), big, st.floats(), special, st.complex_numbers())


def scalars() -> st.SearchStrategy[Any]:
    """Everything but tensors that may stand at a leaf."""
    return st.one_of(
        st.none(),
        _numbers(),
        st.text(max_size=6),
        st.text(st.characters(categories=["Cs", "Lo", "So"]), max_size=3),
        st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.complex64, torch.bool]),
        st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size),
    )


def keys() -> st.SearchStrategy[Any]:
    """Dictionary keys."""
    simple = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
    return st.one_of(simple, st.tuples(simple, simple))


def trees(leaves: st.SearchStrategy[Any] | None = None, most_leaves: int = 8) -> st.SearchStrategy[Any]:
    """Any nesting of tuples, lists and dicts."""
    return st.recursive(
        st.one_of(tensors(), scalars()) if leaves is None else leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(keys(), inner, max_size=3),
        ),
        max_leaves=most_leaves,
    )


def shared_mappings() -> int:
    """How many pieces of shared memory this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:" in line for line in maps)


class Pair:
    """Channels from rank 0 to rank 1 over one link; each has `slots` slots."""

    def __init__(self, hubs: tuple[_core.Hub, _core.Hub], slots: int, channels: int) -> None:
        capacity = slots * channels
        send_link = _core.ShmSendLink(hubs[0], 1, 7, capacity, WAIT_POLICY)
        receive_link = _core.ShmReceiveLink(hubs[1], 0, 7, capacity, WAIT_POLICY)
        self.slots = slots
        self.senders: list[SendChannel] = []
        self.receivers: list[ReceiveChannel] = []
        for number in range(channels):
            sender = _core.ChannelSender(hubs[0], send_link, 1, number, slots)
            receiver = _core.ChannelReceiver(hubs[1], receive_link, 0, number, slots)
            self.senders.append(ShmSendChannel(sender, WAIT_POLICY, number, Kind.F))
            self.receivers.append(ShmReceiveChannel(receiver, WAIT_POLICY, number, Kind.F))

    @property
    def sender(self) -> SendChannel:
        return self.senders[0]

    @property
    def receiver(self) -> ReceiveChannel:
        return self.receivers[0]


@contextlib.contextmanager
def channel_pair(slots: int = 2, channels: int = 1) -> Iterator[Pair]:
    """Two hubs of this process, joined by a socket pair, and channels between them."""
    hubs = (_core.Hub(0), _core.Hub(1))
    for hub, end, peer in zip(hubs, socket.socketpair(), (1, 0), strict=True):
        end.setblocking(False)
        hub.add_peer(peer, end.detach())
    try:
        for hub in hubs:
            hub.start()
        yield Pair(hubs, slots, channels)
    finally:
        for hub in hubs:
            hub.close()
