"""A last stage whose classes are sharded, and the cross entropy of them: `loss_parallel()` around step()."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transparency
from data_parallel_cases import mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional

WIDTH, CLASSES = 8, 6


def train(rank: int, size: int, group: Any, name: str) -> list[str]:
    """Two steps with accumulated gradients, against the whole model; what differs, in words."""
    mesh = mesh_of(size, 2)
    place, tensors = mesh["pp"].get_local_rank(), mesh["dp"]
    count = transparency.count_stages(name, 2)
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        modules: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count - 1)]
        modules.append(nn.Sequential(nn.Linear(WIDTH, CLASSES)))
        for module in modules:
            module.double()
        reference = nn.Sequential(*copy.deepcopy(modules))
        batches = [(torch.randn(7, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (7,))) for _ in range(2)]
    for piece, module in enumerate(modules):
        style = (
            ColwiseParallel(output_layouts=Replicate())
            if piece < count - 1
            else ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        )
        parallelize_module(module, tensors, {"0": style})
    schedule, held = transparency.build(
        place, 2, mesh["pp"].get_group(), name, modules, 3, loss_fn=functional.cross_entropy, timeout=30
    )
    found: list[str] = []

    def check(what: str, mine: Any, theirs: Tensor | None) -> None:
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        worst = transparency.difference(mine, theirs)
        if not worst <= transparency.TOLERANCE:
            found.append(f"rank {rank}, {name}: {what} differs by {worst:g}")

    with schedule:
        for step, (x, y) in enumerate(batches):
            losses: list[Any] = []
            with loss_parallel():
                output = schedule.step(x, target=y, losses=losses)
            expected = reference(x)
            functional.cross_entropy(expected, y).backward()
            if any(piece == count - 1 for piece, _ in held):
                check(f"output of step {step}", output, expected.detach())
                chunks = zip(expected.detach().tensor_split(3), y.tensor_split(3), losses, strict=True)
                for number, (logits, target, loss) in enumerate(chunks):
                    check(f"loss {number} of step {step}", loss, functional.cross_entropy(logits, target))
            for piece, module in held:
                named = zip(module.named_parameters(), reference[piece].parameters(), strict=True)
                for (parameter, a), b in named:
                    check(f"gradient of {parameter} of stage {piece}, step {step}", a.grad, b.grad)
    return found
