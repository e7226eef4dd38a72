"""What ranks see of their memory while they run some program."""

from __future__ import annotations

from typing import Any

import torch
import transparency
from random_programs import one_rank
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import pypipe
from pypipe.program import Channel, Kind, Link, Program, verify
from pypipe.program.lifetimes import fewest_slots
from pypipe.program.messages import Messages
from pypipe.program.positions import find_positions


def messages_in_use(program: Program) -> dict[Channel, int]:
    """For each channel, the most messages that are in use at once: as many slots, unless rendezvous takes more."""
    messages = Messages(program)
    links: dict[Link, list[int]] = {}
    for actions in program.ranks:
        for stage, kind, microbatch in actions:
            if kind.is_receive:
                base = messages.bases[kind][stage]
                links.setdefault(program.link_of(messages.channel(base)), []).append(base + microbatch)
    counts = fewest_slots(program, messages, find_positions(program), links.values())
    return {messages.channel(i * program.n_microbatches): count for i, count in enumerate(counts) if count}


def alive(rank: int, size: int, group: Any, name: str, n_microbatches: int) -> dict[str, tuple[int, int, int]]:
    """For each channel that ends here: the most messages alive in a few steps, what lifetimes say, and spare slots."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(3, 3) for _ in range(transparency.count_stages(name, size))]
    schedule, _ = transparency.build(
        rank, size, group, name, modules, n_microbatches, loss_fn=functional.mse_loss, timeout=30
    )
    x = torch.randn(n_microbatches, 3)
    for _ in range(3):
        schedule.step(x, target=x)
    program = schedule.program
    slots, in_use = verify(program).slots, messages_in_use(program)
    seen = {
        str(channel): (counted["most_alive"], in_use[channel], counted["slots"] - slots[channel])
        for channel, counted in schedule.counters.items()
        if channel.kind is not Kind.W and program.placement[channel.target_stage] == rank
    }
    schedule.close()
    return seen


class Scale(nn.Module):
    """Saves nothing of its input, and notes what is alive of the inputs that it has had."""

    def __init__(self, seen: list[StorageWeakRef], most: list[int]) -> None:
        super().__init__()
        self.bias, self.seen, self.most = nn.Parameter(torch.zeros(5)), seen, most

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.bias
        self.seen.append(StorageWeakRef(x.untyped_storage()))
        if y.requires_grad:
            y.register_hook(self._look)
        return y

    def _look(self, _: Tensor) -> None:
        self.most.append(sum(not ref.expired() for ref in self.seen))


def handed_over(rank: int, size: int, group: Any, split: bool) -> str:
    """Three stages that save nothing: in their backwards none of what was handed over is alive."""
    seen: list[StorageWeakRef] = []
    most: list[int] = []
    modules = [nn.Linear(5, 5), Scale(seen, most), Scale(seen, most)]
    stages = [pypipe.PipelineStage(module, index, 3, group=group) for index, module in enumerate(modules)]
    with pypipe.Schedule(one_rank(3, 4, split=split), stages, 4, functional.mse_loss) as schedule:
        x = torch.randn(8, 5)
        schedule.step(x, target=x, return_outputs=False)
    # The loss saves its input, the last stage's output; nothing saves what the stages got.
    return "" if most and max(most) == 0 else f"alive in the backwards: {most}"
