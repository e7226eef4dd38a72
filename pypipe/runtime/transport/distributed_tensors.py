"""DTensors in messages.

A message carries plain memory. So a DTensor crosses a boundary as its local part, with what it takes to make a DTensor
of that at the other end: its placements, its whole shape, and the names of its mesh's dimensions, since each stage has
its own mesh. Autograd records both conversions, so gradients cross as local parts too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pypipe.errors import LayoutError, MismatchError
from pypipe.runtime.tensor_memory import settled

__all__ = ["Meshes", "is_distributed", "to_distributed", "to_plain"]

Placement = tuple[Any, ...]
Distribution = tuple[Any, ...]
"""What makes a DTensor of its local part: mesh dimension names or None, mesh shape, placements, shape, strides."""


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_plain(tensor: Any, place: str) -> tuple[Tensor, Distribution]:
    """A DTensor's local part, and what makes a DTensor of it again.

    Raises:
        LayoutError: its placement is of a kind that has no name here.
    """
    mesh = tensor.device_mesh
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    placements = tuple(_describe_placement(placement, place) for placement in tensor.placements)
    distribution = (names, tuple(mesh.shape), placements, tuple(tensor.shape), tuple(tensor.stride()))
    return settled(tensor.to_local(grad_placements=_of_gradients(tensor.placements))), distribution


def _of_gradients(placements: Sequence[Any]) -> list[Any]:
    """The placements of a DTensor's gradient: each term of a sum has the whole sum's.

    Older releases of torch take them to be the tensor's own.
    """
    from torch.distributed.tensor import Partial, Replicate

    return [Replicate() if isinstance(placement, Partial) else placement for placement in placements]


def _describe_placement(placement: Any, place: str) -> Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Shard:
        return ("shard", placement.dim)
    if type(placement) is Replicate:
        return ("replicate",)
    if type(placement) is Partial:
        return ("partial", placement.reduce_op)
    raise LayoutError(
        f"{place} is a DTensor with the placement {placement}, which cannot be sent to the next stage: "
        "redistribute() it to Shard or Replicate first"
    )


def to_distributed(local: Tensor, distribution: Distribution, meshes: Meshes | None) -> Tensor:
    """The DTensor whose local part this is.

    Raises:
        LayoutError: this stage has no such mesh.
        MismatchError: a peer sent nonsense.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    names, shape, described, whole, strides = distribution
    kinds: dict[str, Callable[..., Any]] = {"shard": Shard, "replicate": Replicate, "partial": Partial}
    placements = [kinds[kind](*arguments) for kind, *arguments in described]
    if meshes is None:
        raise MismatchError("a peer sent a DTensor where a gradient's plain tensor belongs")
    mesh = meshes.find(names, shape)
    made: Tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(whole), stride=tuple(strides)
    )
    return made


class Meshes:
    """The meshes of one stage, found by the names of their dimensions.

    Args:
        module: the stage's module; its DTensor parameters and buffers tell their meshes.
        where: the stage's name in error messages.
        get_mesh: called with the names, and None, for a mesh that the module does not tell.
    """

    def __init__(self, module: nn.Module, where: str, get_mesh: Callable[..., Any] | None = None) -> None:
        self._module = module
        self._where = where
        self._get_mesh = get_mesh
        self._found: dict[Any, Any] = {}

    def find(self, names: tuple[str, ...] | None, shape: tuple[int, ...]) -> Any:
        """The mesh with these dimensions.

        Raises:
            LayoutError: there is none.
        """
        key = names, tuple(shape)
        mesh = self._found.get(key)
        if mesh is None:
            mesh = self._found[key] = self._look(names, tuple(shape))
        return mesh

    def _look(self, names: tuple[str, ...] | None, shape: tuple[int, ...]) -> Any:
        known = list(self._known())
        for mesh in known:
            own = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
            if own == names and tuple(mesh.shape) == shape:
                return mesh
        for mesh in known:  # a part of a mesh with more dimensions
            if names is not None and mesh.mesh_dim_names is not None and set(names) <= set(mesh.mesh_dim_names):
                part = mesh[names]
                if tuple(part.shape) == shape:
                    return part
        if self._get_mesh is not None and names is not None:
            mesh = self._get_mesh(names, None)
            if tuple(mesh.shape) == shape:
                return mesh
            raise LayoutError(
                f"{self._where}: the stage before sends a DTensor on a mesh {names} of shape {shape}, but get_mesh= "
                f"has one of shape {tuple(mesh.shape)} here: the stages' meshes need the same shape"
            )
        called = "without dimension names" if names is None else f"with the dimensions {', '.join(names)}"
        raise LayoutError(
            f"{self._where}: the stage before sends a DTensor on a mesh {called}, of shape {shape}, but no parameter "
            "of this stage lies on such a mesh: pass get_mesh= to PipelineStage, which is called with the names, or "
            "let the stage before return DTensor.to_local()"
        )

    def _known(self) -> Iterable[Any]:
        meshes: dict[int, Any] = {}
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            if is_distributed(tensor):
                mesh = tensor.device_mesh  # type: ignore[attr-defined]
                meshes.setdefault(id(mesh), mesh)
        return meshes.values()
