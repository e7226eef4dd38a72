"""Adds up, at the end of a step, the gradients of parameters that are one weight in several stages.

Each rank adds up those of its own stages, sends the sum to the other ranks that have the key, over links of kind W,
and adds up all ranks' sums in their order: all get the same bits. Gradients of earlier steps are a sum already. So
during a step one of the parameters keeps them, and the others begin without.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pypipe.errors import InputError
from pypipe.program import Channel, Kind, Link, Program
from pypipe.runtime.rendezvous.equal_ties import Tied
from pypipe.runtime.step.exchanges import Exchange, Exchanges

__all__ = ["TIE", "Ties", "describe_ties", "tie_channels"]

TIE = "pypipe_tie"
"""The attribute of a parameter that has its key."""

_BUCKET_ELEMENTS = 1 << 20  # of one message: large enough for bandwidth, and little memory for slots


def describe_ties(pieces: Iterable[tuple[int, Sequence[nn.Module]]]) -> list[Tied]:
    """The tied parameters of a rank, with what must be the same of all with one key.

    Args:
        pieces: for each stage, which piece of the model it is, and the modules whose parameters it trains.
    """
    found, digests = [], {}
    for piece, modules in pieces:
        for module in modules:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                key = getattr(parameter, TIE, None)
                if key is not None:
                    if id(parameter) not in digests:
                        digests[id(parameter)] = _digest(parameter)
                    found.append(Tied(key, piece, name, _likeness(parameter), digests[id(parameter)]))
    return found


def _likeness(parameter: Tensor) -> str:
    placed = getattr(parameter, "device_mesh", None)
    mesh: Any = placed
    where = "" if mesh is None else f", {parameter.placements} at {mesh.get_coordinate()} of {tuple(mesh.shape)}"  # type: ignore[attr-defined]
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"shape {tuple(parameter.shape)}, {parameter.dtype}{frozen}{where}"


def _digest(parameter: Tensor) -> str:
    values = _local(parameter.detach()).cpu().contiguous()
    size = values.numel() * values.element_size()
    memory = (ctypes.c_char * size).from_address(values.data_ptr()) if size else b""
    return hashlib.sha256(memory).hexdigest()[:32]


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def tie_channels(program: Program, ties: Sequence[Sequence[Tied]]) -> dict[Channel, Link]:
    """The channels over which ranks exchange the gradients of parameters with one key, and the links.

    Args:
        program: what runs.
        ties: by rank.
    """
    pairs = {(a, b) for ranks in _ranks_of(ties).values() for a in ranks for b in ranks if a != b}
    channels = [Channel(Kind.W, _stage_of(program, a), _stage_of(program, b)) for a, b in sorted(pairs)]
    return {channel: program.link_of(channel) for channel in channels}


def _stage_of(program: Program, rank: int) -> int:
    """The stage that stands for a rank in the names of channels: its first."""
    return program.placement.index(rank)


def _ranks_of(ties: Sequence[Sequence[Tied]]) -> dict[str, list[int]]:
    """The ranks of each key, in order."""
    ranks: dict[str, list[int]] = {}
    for rank, listed in enumerate(ties):
        for key in {tied.key for tied in listed}:
            ranks.setdefault(key, []).append(rank)
    return ranks


class _Weight:
    """One key, on this rank.

    Attributes:
        key: what it is.
        parameters: this rank's, each once, in the order of their stages.
        ranks: all that have it, in order.
        exchanges: with each of the other ranks.
    """

    def __init__(self, key: str, ranks: Sequence[int], exchanges: Mapping[int, Exchange]) -> None:
        self.key, self.ranks, self.exchanges = key, ranks, exchanges
        self.parameters: list[nn.Parameter] = []


class Ties:
    """One rank's part in the ties of a pipeline.

    Args:
        program: what runs.
        rank: this rank.
        modules: by their stage in the program, those whose parameters each of this rank's stages trains.
        ties: by rank.
        exchanges: this rank's, over `tie_channels`.
        replicated: the stages whose whole gradients are reduced among replicas.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        modules: Mapping[int, Sequence[nn.Module]],
        ties: Sequence[Sequence[Tied]],
        exchanges: Exchanges,
        replicated: Collection[int] = (),
    ) -> None:
        self._weights: list[_Weight] = []
        self._modules = [module for held in modules.values() for module in held]
        self._replicated: set[int] = set()
        self._before: list[tuple[nn.Parameter, Tensor | None]] = []  # .grad of earlier steps
        ranks_of = _ranks_of(ties)
        for key in sorted({tied.key for tied in ties[rank]}):
            with_peers = {
                peer: exchanges.between(_stage_of(program, rank), _stage_of(program, peer))
                for peer in ranks_of[key]
                if peer != rank
            }
            weight = _Weight(key, ranks_of[key], with_peers)
            for stage in sorted(modules, key=lambda stage: (program.piece_of(stage), stage)):
                for parameter in (p for module in modules[stage] for p in module.parameters()):
                    if getattr(parameter, TIE, None) != key:
                        continue
                    if stage in replicated:
                        self._replicated.add(id(parameter))
                    if all(parameter is not one for one in weight.parameters):
                        weight.parameters.append(parameter)
            self._weights.append(weight)
        self.parameters = frozenset(id(p) for weight in self._weights for p in weight.parameters)
        """The ids of this rank's tied parameters."""
        self.counted = frozenset(id(w.parameters[0]) for w in self._weights if w.ranks[0] == rank)
        """The ids of those that stand for all with their key: they keep `.grad` in a step, and count in norms."""

    def begin(self) -> None:
        """Sets `.grad` of earlier steps aside, but for one parameter of each key.

        There it stays where it is, and this step's gradients are added to it: where earlier steps were not reduced
        among replicas (no_sync()), this step's reduction reduces what there is of them too.

        Raises:
            InputError: a tied parameter was replaced, or has a hook that wants the whole gradient in the backward.
        """
        there = {id(parameter) for module in self._modules for parameter in module.parameters()}
        for weight in self._weights:
            for parameter in weight.parameters:
                # fully_shard's are others while they are gathered.
                if id(parameter) not in there and not hasattr(parameter, "device_mesh"):
                    raise InputError(
                        f"a parameter that is tied as {weight.key!r} is no longer in its stage: another one has taken "
                        "its place since the first step, which is not tied. Load by load_state_dict() without "
                        "assign=True, or tie the new one and build a new schedule, on every rank"
                    )
                if getattr(parameter, "_post_accumulate_grad_hooks", None):
                    raise InputError(
                        f"a parameter that is tied as {weight.key!r} has a hook that runs as soon as its gradient is "
                        "there (such as an optimizer step in the backward), but that is complete only at the end of "
                        "step(), when the gradients of all stages have been added up: remove the hook and call the "
                        "optimizer after step()"
                    )
        self._before = [(p, p.grad) for w in self._weights for p in w.parameters if id(p) not in self.counted]
        for parameter, before in self._before:
            parameter.grad = None
            if before is not None and id(parameter) in self._replicated:
                # A reducer has counted the backwards of steps without a reduction: it expects a gradient.
                parameter.grad = torch.zeros_like(before)

    def abandon(self) -> None:
        """After an error: gives parameters their gradients of earlier steps back."""
        for parameter, before in self._before:
            parameter.grad = before
        self._before = []

    @torch.no_grad()
    def finish(self) -> None:
        """Adds up the gradients of all stages."""
        totals = [_total(weight) for weight in self._weights]
        for weight in self._weights:  # from now on what was sent may be overwritten
            for exchange in weight.exchanges.values():
                exchange.finish()
        before_of = {id(parameter): before for parameter, before in self._before}
        for weight, total in zip(self._weights, totals, strict=True):
            for parameter in weight.parameters:
                gradient = before_of.get(id(parameter))
                gradient = parameter.grad if gradient is None else gradient
                if total is not None:
                    # In the memory that it was in, as a backward does.
                    if gradient is None or gradient.layout != torch.strided:
                        gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                    _local(gradient).copy_(total.view(_local(gradient).shape))
                parameter.grad = gradient
        self._before = []


def _gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """The part of the gradient that this rank has, as a vector, placed as the parameter is."""
    gradient: Any = parameter.grad
    if gradient is None:
        return None
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
    gradient = _local(gradient)
    gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
    return gradient.reshape(-1)  # type: ignore[no-any-return]


def _total(weight: _Weight) -> Tensor | None:
    """The sum over all stages, as a vector; None where no stage has a gradient."""
    mine: Tensor | None = None
    for parameter in weight.parameters:
        gradient = _gradient_of(parameter)
        mine = gradient if mine is None else mine if gradient is None else mine + gradient
    if not weight.exchanges:
        return mine
    count = _local(weight.parameters[0]).numel()
    total: Tensor | None = None
    for start in range(0, max(count, 1), _BUCKET_ELEMENTS):
        stop = min(count, start + _BUCKET_ELEMENTS)
        part = None if mine is None else mine[start:stop]
        for peer in sorted(weight.exchanges):
            weight.exchanges[peer].begin(part)
        added: Tensor | None = None
        for rank in weight.ranks:
            exchange = weight.exchanges.get(rank)
            theirs = part if exchange is None else exchange.receive()
            if theirs is not None:
                added = theirs.clone() if added is None else added + theirs
        for exchange in weight.exchanges.values():
            exchange.release()
        if added is not None:
            if total is None:
                total = added if stop - start == count else added.new_empty(count)
            if total is not added:
                total[start:stop] = added
    return total
