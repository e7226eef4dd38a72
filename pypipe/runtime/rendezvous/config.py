"""What each rank of a pipeline tells the others about itself before they connect."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pypipe.runtime.rendezvous.equal_ties import Tied

__all__ = ["Config"]


@dataclass(frozen=True)
class Config:
    """What one rank was built with. `agreement` says what of it must be the same on all ranks.

    Attributes:
        version: of pypipe.
        schedule: the class, or the name of the program.
        num_stages: as each PipelineStage has it.
        stages: which pieces of the model the rank holds.
        n_microbatches: M.
        program: the program's digest; None where num_stages does not fit the number of ranks.
        loss_fn: whether there is one.
        scale_grads: as the schedule has it.
        check: those that are on, by name.
        shapes: as the schedule has it.
        communicators: what PYPIPE_NCCL_COMMUNICATORS asks for.
        max_ctas: what PYPIPE_NCCL_MAX_CTAS asks for; 0: nothing.
        multiprocessors: of the rank's GPU; 0: unknown.
        state_names: for each stage, a sketch of its `state_dict` keys; see `state_names`.
        data_parallel: for each stage, whether its gradients are reduced and whether its parameters are sharded.
        copies: for each stage, what its parameters are like, where the pipeline holds two copies of the model.
        ties: the parameters that are one weight with others': the fields of `equal_ties.Tied`.
        link: what PYPIPE_LINK asks for.
        device: the type of device.
        group: whether there is a process group.
        host: equal on two ranks if processes there can share memory.
    """

    version: str = ""
    schedule: str = ""
    num_stages: int = 0
    stages: list[int] = field(default_factory=list)
    n_microbatches: int = 0
    program: str | None = None
    loss_fn: bool = False
    scale_grads: bool = True
    check: list[str] = field(default_factory=list)
    shapes: str = "dynamic"
    communicators: str = "auto"
    max_ctas: int = 0
    multiprocessors: int = 0
    state_names: list[str] = field(default_factory=list)
    data_parallel: list[list[bool]] = field(default_factory=list)
    copies: list[list[Any]] = field(default_factory=list)
    ties: list[list[Any]] = field(default_factory=list)
    link: str = "auto"
    device: str = "cpu"
    group: bool = False
    host: str = ""

    @property
    def tied(self) -> list[Tied]:
        """The `ties`."""
        return [Tied(*fields) for fields in self.ties]

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Config:
        """What encode() made, maybe of another version of pypipe: what that has besides is left out."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})
