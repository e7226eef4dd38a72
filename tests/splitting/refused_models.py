"""Models that cannot be cut where they are, and what split() is to say of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from splitting_models import WIDTH
from torch import Tensor, nn
from torch.nn import functional


class Four(nn.Module):
    """Four layers in a row; the models below do something else as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Keeps(nn.Module):
    """Keeps what it makes in a dict that others look into."""

    def __init__(self, kept: dict[str, Tensor], has: bool) -> None:
        super().__init__()
        self.linear, self.kept, self.has = nn.Linear(WIDTH, WIDTH), kept, has

    def forward(self, x: Tensor) -> Tensor:
        if self.has:
            return self.linear(x) + self.kept["x"]
        self.kept["x"] = self.linear(x)
        return x


class Round(Four):
    def __init__(self) -> None:
        super().__init__()
        kept: dict[str, Tensor] = {}
        self.layers[1], self.layers[2] = Keeps(kept, False), Keeps(kept, True)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.linear(x)


class InPlace(Four):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Adds()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[3](self.layers[2](self.layers[1](x))) + x


class ChangesInput(Four):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return super().forward(x)


class Looks(Four):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if x.sum() > 0:
            x = x * 2
        return self.layers[3](self.layers[2](self.layers[1](x)))


class Noise(Four):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        x = self.layers[1](self.layers[0](x) + noise)
        return self.layers[3](self.layers[2](x) + noise)


class DropsOut(Four):
    def forward(self, x: Tensor) -> Tensor:
        kept = functional.dropout(self.layers[0](x), 0.5, self.training)
        return self.layers[3](self.layers[2](self.layers[1](kept)) + kept)


class Twice(Four):
    """Runs one block two times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.block(self.block(x)))


class Caches(Four):
    """Returns what a layer kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.layers[0] = Keeps(self.kept, False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.kept


class Peeks(nn.Module):
    """Looks into the model that it is a part of."""

    def __init__(self, model: list[Any]) -> None:
        super().__init__()
        self.linear, self.model = nn.Linear(WIDTH, WIDTH), model

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.model[0].latest


class Attribute(Four):
    def __init__(self) -> None:
        super().__init__()
        self.latest: Any = None
        self.layers[3] = Peeks([self])

    def forward(self, x: Tensor) -> Tensor:
        self.latest = self.layers[0](x)
        return self.layers[3](self.layers[2](self.layers[1](self.latest)))


def hooked() -> nn.Module:
    """A model with a hook of its own."""
    model = Four()
    model.register_forward_hook(lambda *_: None)
    return model


MAKERS: dict[str, Callable[[], nn.Module]] = {
    name: kind for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, Four)
}
MAKERS["hooked"] = hooked
MAKERS["compiled"] = lambda: torch.compile(Four(), backend="eager")  # type: ignore[assignment, return-value]

MAKERS["later"] = lambda: DropsOut().eval()

# Model; what is asked for; words of the message.
Row = tuple[str, dict[str, Any], list[str]]
HALF = {"at": ["layers.2"]}
CASES: dict[str, Row] = {
    "unknown": ("Four", {"at": ["layer.2"]}, ["no module 'layer.2'", "did you mean", "layers.2"]),
    "nothing": ("Four", {"at": [5]}, ["names of the model's modules", "5"]),
    "itself": ("Four", {"at": [""]}, ["no module ''"]),
    "doubled": ("Four", {"at": ["layers.2", "layers.2"]}, ["layers.2 twice"]),
    "order": ("Four", {"at": ["layers.2", "layers.1", "layers.3"]}, ["out of order", "layers.1", "layers.2"]),
    "never": ("Twice", {"at": ["layers.1"]}, ["layers.1 is never called"]),
    "container": ("Four", {"at": ["layers"]}, ["layers is never called", "nearest", "layers.0"]),
    "few": ("Four", {"at": "layers", "placement": [0, 1, 0, 1, 0, 1]}, ["4 modules", "6 stages"]),
    "no_list": ("Four", {"at": nn.ModuleList()}, ["not a part of the model"]),
    "uneven": ("Four", {"at": ["layers.1", "layers.2"]}, ["3 stages", "2 ranks", "multiple of 2"]),
    "not_v": ("Four", {"at": ["layers.1"], "placement": "v"}, ["2 stages", "'v' places 4 on 2 ranks", "3 modules"]),
    "shape": ("Four", HALF | {"placement": "w"}, ['"loop", "v", "bidirectional"']),
    "ranks": ("Four", HALF | {"placement": [0, 2]}, ["[0, 2]", "rank of each of 2 stages"]),
    "idle": ("Four", HALF | {"placement": [0, 0]}, ["rank 1 has no stage"]),
    "no_example": ("Four", HALF | {"example": None}, ["example="]),
    "odd_example": ("Four", HALF | {"example": 5}, ["example= is a int"]),
    "twice": ("Twice", {"at": ["block.1"]}, ["inside block", "runs 2 times", "cut before block"]),
    "round": ("Round", HALF, ["goes round the cut", "layers.2 (stage 1)", "layers.1 (stage 0)", "Return it"]),
    "in_place": ("InPlace", HALF, ["the model's output", "layers.1 (stage 0)", "in place"]),
    "input": ("ChangesInput", HALF, ["ChangesInput", "an input", "in place", "clone()"]),
    "looks": ("Looks", HALF, ["Looks", "looks at a value", "within a module"]),
    "noise": ("Noise", HALF, ["Noise", "random numbers", "stages 0 and 1", "Dropout"]),
    "drops_out": ("DropsOut", HALF, ["random numbers", "stages"]),
    "later": ("later", HALF, ["random numbers", "stages 0 and 1"]),  # in training
    "caches": ("Caches", HALF, ["the model's output", "layers.0 (stage 0)", "output=lambda"]),
    "attribute": ("Attribute", HALF, ["layers.3 uses", "layers.0 returned", "pass it as an argument"]),
    "compiled": ("compiled", {"at": ["_orig_mod.layers.2"]}, ["OptimizedModule around a cut", "compile the stages"]),
    "hooked": ("hooked", HALF, ["Four has hooks", "every stage"]),
}
