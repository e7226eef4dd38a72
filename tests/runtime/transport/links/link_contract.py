"""What every link owes to a tensor: a pipeline of two stages passes messages on, and the second stage looks at them.

The first stage makes a message out of its input and a weight; the second one makes the same message by itself, compares
what has arrived with it bit by bit, and computes a loss whose gradients come back to it in other layouts. What is
compared at the end is the weight's gradient, and the unpipelined model's.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import channel_pair
import nccl_cases
import torch
from torch import Tensor, nn

import pypipe

CPU = torch.device("cpu")
ROWS, FEATURES = 4, 144
SHAPE = (2, 3, 4, 6)  # of one row's features
LINKS = ("shm", "c10d", "nccl")

Message = Callable[[Tensor], Any]
"""Makes a tree of a float64 tensor of ROWS x FEATURES values, which requires a gradient."""


def _volume(values: Tensor) -> Tensor:
    return values[:, :FEATURES].reshape(-1, *SHAPE)[0]


def _complex(values: Tensor) -> Tensor:
    return torch.complex(_volume(values), _volume(values.flip(1)))


WAYS: dict[str, Message] = {
    "contiguous": _volume,
    "begins inside its storage": lambda v: _volume(v)[1:],
    "transposed": lambda v: _volume(v).mT,
    "permuted": lambda v: _volume(v).permute(3, 1, 0, 2),
    "channels_last": lambda v: _volume(v).contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda v: _volume(v)[None].contiguous(memory_format=torch.channels_last_3d),
    "transposed and inside its storage": lambda v: _volume(v).mT[1:],
    "gaps": lambda v: _volume(v)[..., ::2],
    "gaps and transposed": lambda v: _volume(v).mT[:, 1:, ::3],
    "a diagonal": lambda v: _volume(v)[0, 0].diagonal(),
    "one column": lambda v: _volume(v)[0, 0, :, 1],
    "dimensions of one element": lambda v: _volume(v)[:1, :, 2:3].transpose(0, 1),
    "no rows": lambda v: _volume(v)[:0],
    "no columns": lambda v: _volume(v)[..., :0].mT,
    "0-dimensional": lambda v: _volume(v).sum(),
    "0-dimensional, inside its storage": lambda v: _volume(v)[1, 2, 3, 4],
    "expanded": lambda v: _volume(v)[0, 0].unsqueeze(1).expand(4, 5, 6),
    "one element, expanded": lambda v: _volume(v).mean().expand(3, 2),
    "windows that overlap": lambda v: _volume(v).flatten().unfold(0, 5, 2),
    "complex": _complex,
    "complex and transposed": lambda v: _complex(v).mT,
    "conjugate": lambda v: _complex(v).conj(),
    "conjugate and transposed": lambda v: _complex(v).mH,
    "conjugate with gaps": lambda v: _complex(v).conj()[..., 1::2],
    "negative": lambda v: _complex(v).conj().imag,
    "real part": lambda v: _complex(v).real,
    "detached": lambda v: _volume(v).detach().mT,
    "an integer": lambda v: (_volume(v).detach() * 1e6).long().mT,
    "a mask": lambda v: (_volume(v).detach() > 0).permute(2, 0, 3, 1),
}


def _together(makes: Iterable[Message]) -> Message:
    order = tuple(makes)
    return lambda v: tuple(make(v) for make in order)


def _orders(way: str) -> Iterator[Message]:
    """Messages in which a tensor of this kind is alone, in each place among others, twice, and beside its own views."""
    make = WAYS[way]
    yield make
    others = (_volume, lambda v: (_volume(v) * 2).mT, make)
    for order in itertools.permutations(others):
        yield _together(order)
    yield lambda v: [make(v), make(v)]
    yield lambda v: (lambda t: {"a": t, "b": (_volume(v), t), "c": t})(make(v))
    yield lambda v: (lambda t: (t, t.unsqueeze(0), t.unsqueeze(-1).transpose(0, -1)))(make(v))
    yield lambda v: (WAYS["no rows"](v), WAYS["0-dimensional"](v), make(v), WAYS["no rows"](v).byte())


def _raw(values: Tensor, dtype: torch.dtype, count: int, start: int) -> Tensor:
    """Tensors whose bits are any: they depend on the input, so every microbatch has other ones."""
    seed = int(values.detach().sum().item() * 1000) % 251
    raw = ((torch.arange(count * dtype.itemsize) + start) * 37 + seed).to(torch.uint8)
    return (raw & 1 if dtype == torch.bool else raw).view(dtype)


def _of_dtype(dtype: torch.dtype) -> Iterator[Message]:
    """Messages of tensors of this dtype, some with requires_grad where it can have a gradient, in every order."""
    flat: Message = lambda v: _raw(v, dtype, 24, 0).view(4, 6)  # noqa: E731
    kinds: list[Message] = [
        lambda v: flat(v).t(),
        lambda v: _raw(v, dtype, 24, 5).view(2, 3, 4).permute(1, 2, 0),
        lambda v: flat(v)[:, ::2],
        lambda v: flat(v)[1, 2],
        lambda v: torch.empty(0, 3, dtype=dtype),
    ]
    if dtype.is_floating_point or dtype.is_complex:
        kinds.append(lambda v: _volume(v).to(dtype).mT if _casts(dtype) else flat(v))
    for start in range(len(kinds)):
        yield _together([*kinds[start:], *kinds[:start], flat])


@functools.cache
@torch.enable_grad()
def _casts(dtype: torch.dtype) -> bool:
    """Whether autograd can pass from float64 to this dtype and back."""
    try:
        leaf = torch.ones(2, dtype=torch.float64, requires_grad=True)
        cast = leaf.to(dtype)
        cast.backward(torch.ones(2, dtype=torch.float64).to(dtype))
        return leaf.grad is not None and cast.requires_grad
    except (RuntimeError, NotImplementedError):
        return False


def _every_pair() -> Iterator[Message]:
    """Messages in which each kind of tensor comes right before each other one."""
    names = list(WAYS)
    for step in range(1, len(names)):
        yield _together(WAYS[names[number * step % len(names)]] for number in range(len(names)))


def messages(case: str) -> list[Message]:
    """The messages of a case: one of WAYS, a dtype, or `every pair`."""
    if case == "every pair":
        return list(_every_pair())
    return list(_orders(case)) if case in WAYS else list(_of_dtype(getattr(torch, case)))


class Sends(nn.Module):
    """The first stage."""

    message: Message

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1.5, FEATURES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return type(self).message(x * self.weight)


def _leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    else:
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(item)


class Uses(nn.Module):
    """The last stage: a number that depends on every value of every tensor that has a gradient, and on its place."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        total = self.bias * 1
        for number, tensor in enumerate(_leaves((args, kwargs))):
            if not tensor.requires_grad:
                continue
            real = torch.view_as_real(tensor.to(torch.complex128).resolve_conj()) if tensor.is_complex() else tensor
            # The gradient of the one half is expanded, that of the other one dense, in a layout of its own.
            flat = real.to(torch.float64).permute(tuple(reversed(range(real.dim()))))
            weights = torch.arange(1.0, flat.numel() + 1, dtype=torch.float64).view(flat.shape) % 4 + 1
            total = total + (number % 2 + 1) * flat.sum() + (flat * weights).sum()
        return total.expand(1)


class Looks(Uses):
    """The last stage in the pipeline: also says how what has arrived differs from what was sent."""

    def __init__(self, sender: Sends) -> None:
        super().__init__()
        self._sender = [sender]  # no submodule
        self.found: list[str] = []
        self.inputs: list[Tensor] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.enable_grad():
            sent = self._sender[0](self.inputs.pop(0))
        got: Any = args[0] if not isinstance(sent, (tuple, list)) else args if isinstance(sent, tuple) else list(args)
        self.found.append(channel_pair.difference(sent, got))
        if channel_pair.identities(sent) != channel_pair.identities(got):
            self.found.append("a tensor that was sent twice is two tensors here, or the other way round")
        for one, other in zip(_leaves(sent), _leaves(got), strict=True):
            if other.requires_grad != (one.requires_grad and torch.is_grad_enabled()):
                self.found.append(f"requires_grad of a tensor of shape {tuple(one.shape)} became {other.requires_grad}")
        return super().forward(*args, **kwargs)


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


@contextmanager
def _over(link: str) -> Iterator[None]:
    compute = nccl_cases.compute_stream().installed() if link == "nccl" else nullcontext()
    with patch.dict(os.environ, PYPIPE_LINK=link), compute:
        yield


def check(rank: int, size: int, group: Any, link: str, case: str, wanted: str | None = None) -> list[str]:
    """Steps and evaluations with every message of a case; what went wrong, in words."""
    sender = Sends()
    module: nn.Module = Looks(sender) if rank == 1 else sender
    found: list[str] = []
    with _over(link):
        stage = pypipe.PipelineStage(module, rank, 2, CPU, group=group)
        schedule = pypipe.Schedule1F1B(stage, 2, _mean, timeout=30, check=wanted)
        for number, message in enumerate(messages(case)):
            Sends.message = staticmethod(message)
            x = torch.randn(ROWS, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
            for training in (True, False):
                if isinstance(module, Looks):
                    module.inputs = list(x.chunk(2))
                if training:
                    schedule.step(x, target=x)
                else:
                    schedule.eval(x)
                if isinstance(module, Looks):
                    where = f"{case}, message {number}, {'step' if training else 'eval'}"
                    found += [f"{where}: {text}" for text in module.found if text]
                    module.found.clear()
            if isinstance(module, Sends):
                found += [f"{case}, message {number}: {text}" for text in _gradient(module, message, x)]
        schedule.close()
    if link == "nccl":
        emulator = nccl_cases.control()
        emulator.settle(nccl_cases.compute_stream().handle)
        found += nccl_cases.hazards(emulator, rank)
        emulator.reset_counters()
    return found


def _gradient(module: Sends, message: Message, x: Tensor) -> list[str]:
    """How the weight's gradient differs from that of the unpipelined model."""
    reference, last = Sends(), Uses()
    outputs = []
    for part in x.chunk(2):
        tree = reference(part)
        outputs.append(last(*tree) if isinstance(tree, (tuple, list)) else last(tree))
    torch.cat(outputs).mean().backward()
    got, expected = module.weight.grad, reference.weight.grad
    module.weight.grad = None
    if (got is None) != (expected is None):
        return [f"the weight {'has no' if got is None else 'has a'} gradient"]
    if got is None or expected is None:
        return []
    worst = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
    return [f"the weight's gradient differs by {worst:g}"] if not worst <= 1e-12 else []
