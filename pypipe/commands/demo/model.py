"""The demo's GPT, buildable a stage at a time, and the batches that it is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pypipe.commands.demo.options import HEAD_WIDTH


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT: characters it knows, characters a sequence, vector width, number of blocks."""

    vocabulary: int
    context: int
    width: int
    blocks: int


class Embedding(nn.Module):
    """Characters and their places as vectors: int64 (batch, context) to float32 (batch, context, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.characters = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        for table in (self.characters, self.places):
            nn.init.normal_(table.weight, std=0.5)  # large, so that 60 steps learn something

    def forward(self, tokens: Tensor) -> Tensor:
        """From int64 (batch, context) to float32 (batch, context, width)."""
        vectors: Tensor = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        return vectors


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each normalized before and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.queries_keys_values = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, context, width) to the same shape."""
        heads = self.queries_keys_values(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, context, head width)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.perceptron(x)
        return result


class Head(nn.Module):
    """One score per character of the vocabulary: (batch, context, width) to (batch, context, vocabulary)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.scores = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, context, width) to (batch, context, vocabulary)."""
        scores: Tensor = self.scores(self.norm(x))
        return scores


def build_stage(shape: Shape, stage: int, stages: int, seed: int) -> nn.Sequential:
    """Builds one stage and nothing of the others; stage 0 of 1 is the whole model.

    Each layer draws its weights from a seed of its own, so they don't depend on how the layers are divided.
    The blocks are divided as evenly as possible, the first stages taking what is left over.
    """
    count, left_over = divmod(shape.blocks, stages)
    first = 1 + stage * count + min(stage, left_over)
    layers = range(first, first + count + (stage < left_over))
    if stage == 0:
        layers = range(layers.stop)
    if stage == stages - 1:
        layers = range(layers.start, shape.blocks + 2)
    return nn.Sequential(*(_build_layer(shape, layer, seed) for layer in layers))


def _build_layer(shape: Shape, layer: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed * (shape.blocks + 2) + layer)
        if layer == 0:
            return Embedding(shape)
        return Block(shape) if layer <= shape.blocks else Head(shape)


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy in nats: scores (batch, context, vocabulary), target (batch, context)."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def optimizer_for(module: nn.Module) -> torch.optim.Optimizer:
    """Adam, whose epsilon keeps it from scaling rounding noise up to whole steps where gradients vanish."""
    return torch.optim.Adam(module.parameters(), lr=5e-3, betas=(0.9, 0.99), eps=1e-6)


def encode(text: str) -> tuple[Tensor, int]:
    """Returns the text as int64 tokens, and the number of distinct characters."""
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text]), len(numbers)


def batches(tokens: Tensor, batch: int, context: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields `steps` pairs of inputs and targets, each int64 (batch, context).

    They are sequences from random places of the text, and the same moved on by one character. The same seed
    gives the same pairs on every rank.
    """
    random = torch.Generator().manual_seed(seed)
    window = torch.arange(context)
    for _ in range(steps):
        places = torch.randint(len(tokens) - context, (batch, 1), generator=random) + window
        yield tokens[places], tokens[places + 1]
