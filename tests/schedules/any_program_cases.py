"""What ranks see of their memory while they run some program."""

from __future__ import annotations

from typing import Any

import torch
import transparency
from models import make, twins, unpipelined
from random_programs import one_rank
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import pypipe
from pypipe.program import Channel, Kind, Link, Program, verify
from pypipe.program.messages import Messages
from pypipe.program.verification.lifetimes import fewest_slots
from pypipe.program.verification.positions import find_positions


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


def several_at_once(rank: int, size: int, group: Any) -> list[str]:
    """Schedules of several stages in turn, eval() before, between and after, gradients added up over two steps."""
    found: list[str] = []
    names = ["ScheduleZBVZeroBubble", "ScheduleDualPipe", "ScheduleInterleaved1F1B v=3"]
    trained = []
    for number, name in enumerate(names):
        modules, batch, loss_fn = make(["mlp", "gpt", "mixed"][number], transparency.count_stages(name, size), number)
        reference = twins(modules)
        built = transparency.build(rank, size, group, name, modules, 3, loss_fn=loss_fn, timeout=20)
        trained.append((name, reference, batch, loss_fn, built))
    for turn in range(6):
        name, reference, batch, loss_fn, (schedule, held) = trained[turn % 3]
        x, y = batch(7)
        for _ in range(turn % 2 + 1):
            schedule.eval(x)
        schedule.step(x, target=y, return_outputs=False)
        loss_fn(unpipelined(reference, x), y).backward()
        losses: list[Tensor] = []
        schedule.eval(x, target=y, losses=losses)
        last = any(piece == len(reference) - 1 for piece, _ in held)
        if len(losses) != 3 * last:
            found.append(f"{name}: eval() gave {len(losses)} losses")
        for piece, module in held:
            for (which, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
                if not transparency.difference(a.grad, b.grad) <= transparency.TOLERANCE:
                    found.append(f"{name}, turn {turn}: the gradient of {which} of stage {piece} differs")
    for *_, (schedule, _) in trained:
        schedule.close()
    return found


class Faulty(nn.Module):
    """Raises in its second forward, or in the backward of that."""

    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        self.linear, self.in_backward, self.count = nn.Linear(3, 3), in_backward, 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.count += 1
        if self.count == 2:
            if not self.in_backward:
                raise ZeroDivisionError("out of luck")
            y.register_hook(self._fail)
        return y

    def _fail(self, _: Tensor) -> None:
        raise ZeroDivisionError("out of luck")


def fails(rank: int, size: int, group: Any, piece: int, in_backward: bool) -> tuple[str, str]:
    """What a rank raises when one of its stages or of another rank's fails; and what a further step() raises."""
    modules: list[nn.Module] = [nn.Linear(3, 3) for _ in range(2 * size)]
    modules[piece] = Faulty(in_backward)
    schedule, _ = transparency.build(
        rank, size, group, "ScheduleZBVZeroBubble", modules, 5, loss_fn=functional.mse_loss, timeout=20
    )
    raised = []
    for _ in range(2):
        try:
            schedule.step(torch.ones(5, 3), target=torch.ones(5, 3))
            raised.append("nothing")
        except Exception as error:
            raised.append("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
    schedule.close()
    return raised[0], raised[1]
