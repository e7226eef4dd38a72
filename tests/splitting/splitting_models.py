"""Small models of the kinds that are hard to cut, in float64; each with the places where it is cut into 2 and into 4.

None of their forward() knows of a pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, LENGTH = 13, 8, 5


class Example(NamedTuple):
    """A model and what it is trained with.

    Attributes:
        model: in float64.
        cuts: by number of stages, the modules before which it is cut.
        batch: makes the arguments, the keyword arguments and the target of so many rows.
        loss: of the output and the target.
        output: picks from what the model returns.
    """

    model: nn.Module
    cuts: dict[int, Any]
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any], Tensor]]
    loss: Callable[[Any, Tensor], Tensor]
    output: Callable[[Any], Any] | None = None


class Block(nn.Module):
    """A transformer's block; it may take a mask, rotations and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def attend(self, x: Tensor, mask: Tensor | None, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        if rotation is not None:
            q, k = (t * rotation[0] + t.roll(1, -1) * rotation[1] for t in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, rotation: Any = None) -> Tensor:
        x = x + self.attend(self.norm1(x), mask, rotation)
        return x + self.mlp(self.norm2(x))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(1.0, WIDTH // 2 + 1), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None] * self.get_buffer("frequencies")
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Chain(nn.Module):
    """A mask computed from the words, rotations, and keyword arguments to each block."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rotary = Rotary()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        length = words.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask = causal & (words != 0)[:, None, None, :] | torch.eye(length, dtype=torch.bool)
        if bool((words == WORDS).any()):
            raise ValueError("no such word")
        rotation = self.rotary(x, torch.arange(length, device=x.device))
        for block in self.blocks:
            x = block(x, mask, rotation=rotation)
        return self.head(self.norm(x))


@dataclasses.dataclass
class Out:
    logits: Tensor
    hidden: Tensor | None = None


class BiasBlock(nn.Module):
    """The first one makes a bias, which all get; returns a tuple."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.block = Block()
        self.bias = nn.Embedding(LENGTH, 2) if first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.bias is not None
            place = torch.arange(x.shape[1])
            bias = self.bias((place[:, None] - place).abs()).permute(2, 0, 1)[None]
        return self.block(x, bias), bias


class Biased(nn.Module):
    """Relative positions, dataclass output, only keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(BiasBlock(i == 0) for i in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, *, words: Tensor, scale: float = 1.0) -> Out:
        x, bias = self.embed(words) * scale, None
        for block in self.blocks:
            x, bias = block(x, bias)
        return Out(self.head(x), x)


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.query = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        x = self.block(x)
        return x + functional.scaled_dot_product_attention(self.query(x), states, states)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return x


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(CrossBlock() for _ in range(3))

    def forward(self, words: Tensor, states: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x, states)
        return x


class EncoderDecoder(nn.Module):
    """Every block of the decoder looks at the encoder's states."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = Encoder(), Decoder(), nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, words: Tensor) -> Tensor:
        return self.head(self.decoder(words, self.encoder(source)))


class Experts(nn.Module):
    """Each row goes to the expert that its values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best, chosen = weights.max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            where = torch.where(chosen == number)
            out[where] = best[where][:, None] * self.experts[number](x[where])
        return x + out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(Block(), Experts()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Net(nn.Module):
    """U-shaped: what goes down is joined on the way up. With batches' statistics, dropout and changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)
        self.act = nn.GELU()
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = self.act(layer(x))
            x += scale
            kept.append(x)
        for layer in self.up:
            x = self.relu(layer(torch.cat([x, kept.pop()], 1)))
        return x


class Direct(nn.Module):
    """Weights that are used outside of modules: places at the front, the embedding once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.scale = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.place[: words.shape[1]]
        return functional.linear(self.blocks(x), self.scale)


class Shared(nn.Module):
    """One block with weights that runs twice, batches' statistics, and blocks that are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.second = nn.Linear(WIDTH, WIDTH), Block(), Block()
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.first(functional.one_hot(words % WIDTH, WIDTH).double())
        x = checkpoint(self.shared, x, use_reentrant=False)
        x = checkpoint(self.second, x, use_reentrant=False)
        x = self.shared(x)
        return self.last(x if self.training else self.norm(x.mT).mT)


class Modes(nn.Module):
    """Computes other things in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop, self.norm, self.last = nn.Dropout(0.0), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        dropped = self.drop(x)
        x = self.first(dropped)
        extra = self.side(x) if self.training else self.norm(x)
        return self.last(self.third(self.second(x))) + extra + dropped


def _words(rows: int) -> Tensor:
    """Sequences of another length at another number of rows."""
    return torch.randint(0, WORDS, (rows, LENGTH - rows % 2))


def _cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(out.flatten(0, 1), target.flatten())


def _chain() -> Example:
    cuts = {2: ["blocks.4"], 4: ["blocks.2", "blocks.4", "blocks.6"], 8: [f"blocks.{i}" for i in range(1, 8)]}
    return Example(Chain(), cuts, lambda rows: ((_words(rows),), {}, _words(rows)), _cross_entropy)


def _within() -> Example:
    """Cut in the middle of blocks."""
    cuts = {2: ["blocks.3.mlp"], 4: ["blocks.1.norm2", "blocks.3.out", "blocks.5.mlp.2"]}
    return _chain()._replace(cuts=cuts)


def _biased() -> Example:
    cuts = {2: ["blocks.2"], 4: ["blocks.1", "blocks.2", "head"]}
    return Example(
        Biased(),
        cuts,
        lambda rows: ((), {"words": _words(rows), "scale": 0.5}, _words(rows)),
        _cross_entropy,
        lambda out: out.logits,
    )


def _encoder_decoder() -> Example:
    cuts = {2: ["decoder"], 4: ["encoder.blocks.2", "decoder.blocks.0", "decoder.blocks.2"]}
    return Example(
        EncoderDecoder(), cuts, lambda rows: ((_words(rows), _words(rows)), {}, _words(rows)), _cross_entropy
    )


def _mixture() -> Example:
    cuts = {2: ["layers.2"], 4: ["layers.1", "layers.2.1", "layers.3"]}
    return Example(Mixture(), cuts, lambda rows: ((_words(rows),), {}, _words(rows)), _cross_entropy)


def _net() -> Example:
    cuts = {2: ["up.0"], 4: ["down.2", "up.0", "up.2"]}

    def batch(rows: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
        x, scale = torch.randn(rows, WIDTH, dtype=torch.float64), torch.randn(rows, 1, dtype=torch.float64)
        return (x,), {"scale": scale}, torch.randn(rows, WIDTH, dtype=torch.float64)

    return Example(Net(), cuts, batch, functional.mse_loss)


def _direct() -> Example:
    cuts = {2: ["blocks.0"], 4: ["blocks.0", "blocks.2", "blocks.3.mlp"]}
    return Example(Direct(), cuts, lambda rows: ((_words(rows),), {}, _words(rows)), _cross_entropy)


def _shared() -> Example:
    cuts = {2: ["second"], 4: ["shared", "second", "last"]}
    return Example(Shared(), cuts, lambda rows: ((_words(rows),), {}, _words(rows)), _cross_entropy)


def _modes() -> Example:
    def batch(rows: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
        return (torch.randn(rows, WIDTH, dtype=torch.float64),), {}, torch.randn(rows, WIDTH, dtype=torch.float64)

    return Example(Modes(), {2: ["last"], 4: ["second", "third", "last"]}, batch, functional.mse_loss)


def _tied() -> Example:
    return _chain()._replace(model=Chain(tied=True))


MODELS = {
    "chain": _chain,
    "within": _within,
    "biased": _biased,
    "encoder-decoder": _encoder_decoder,
    "mixture": _mixture,
    "net": _net,
    "direct": _direct,
    "shared": _shared,
    "tied": _tied,
    "modes": _modes,
}


def make(name: str) -> Example:
    """A model of this name, the same at every call."""
    torch.manual_seed(0)
    example = MODELS[name]()
    example.model.double()
    return example
