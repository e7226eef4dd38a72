"""What a pipeline holds in memory, seen from inside its rank processes."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import pypipe

WIDTH = 64


class Watch(nn.Module):
    """A stage that counts what is alive of its earlier outputs, input gradients and saved activations.

    It looks whenever the executor runs it: as a forward starts, and as a backward starts. By then everything that
    belongs to an earlier action has been sent.
    """

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = last
        self.outputs: list[StorageWeakRef] = []
        self.objects: list[weakref.ref[Tensor]] = []
        self.gradients: list[StorageWeakRef] = []
        self.most_outputs = self.most_objects = self.most_gradients = 0
        self.saved = self.most_saved = 0

    def look(self) -> None:
        self.most_outputs = max(self.most_outputs, sum(not ref.expired() for ref in self.outputs))
        self.most_objects = max(self.most_objects, sum(ref() is not None for ref in self.objects))
        self.most_gradients = max(self.most_gradients, sum(not ref.expired() for ref in self.gradients))

    def _pack(self, tensor: Tensor) -> Any:
        held = _Held(tensor.detach())
        if not isinstance(tensor, nn.Parameter) and tensor.shape[:1] != (WIDTH,):
            self.saved += held.bytes
            self.most_saved = max(self.most_saved, self.saved)
            weakref.finalize(held, self._forget, held.bytes)
        return held

    def _forget(self, size: int) -> None:
        self.saved -= size

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        if x.requires_grad:
            x.register_hook(lambda gradient: self.gradients.append(StorageWeakRef(gradient.untyped_storage())))
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _Held.unpack):
            y: Tensor = self.second(torch.tanh(self.linear(x)))
        if y.requires_grad:
            y.register_hook(lambda _: self.look())
        self.outputs.append(StorageWeakRef(y.untyped_storage()))
        self.objects.append(weakref.ref(y))
        return y


class _Held:
    """A tensor that is saved for backward; dies with the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.bytes = tensor.numel() * tensor.element_size()

    def unpack(self) -> Tensor:
        return self.tensor


def _schedule(
    rank: int, size: int, group: Any, name: str, n_microbatches: int, module: nn.Module, link: str = "auto", **more: Any
) -> Any:
    os.environ["PYPIPE_LINK"] = link
    try:
        stage = pypipe.PipelineStage(module, rank, size, torch.device("cpu"), group=group)
        schedule = getattr(pypipe, name)(
            stage, n_microbatches=n_microbatches, loss_fn=functional.mse_loss, timeout=20, **more
        )
        schedule.eval(torch.zeros(n_microbatches, WIDTH))  # connects
        return schedule
    finally:
        del os.environ["PYPIPE_LINK"]


def counters(
    rank: int, size: int, group: Any, name: str, n_microbatches: int, link: str
) -> tuple[dict[Any, dict[str, int]], dict[Any, dict[str, int]]]:
    """The counters of every channel after a few steps and evals, and after more of them."""
    torch.manual_seed(0)
    with _schedule(rank, size, group, name, n_microbatches, nn.Linear(WIDTH, WIDTH), link) as schedule:
        x, y = torch.randn(2 * n_microbatches, WIDTH), torch.randn(2 * n_microbatches, WIDTH)

        def run(times: int) -> dict[Any, dict[str, int]]:
            for _ in range(times):
                schedule.step(x, target=y)
                schedule.eval(x)
            return {(str(c.kind), c.source_stage, c.target_stage): n for c, n in schedule.counters.items()}

        return run(2), run(4)


def watched(rank: int, size: int, group: Any, name: str, n_microbatches: int) -> dict[str, int]:
    """What a stage saw of its own leftovers in a few steps, in units of one microbatch's boundary tensor."""
    torch.manual_seed(0)
    module = Watch(rank == size - 1)
    rows = 3
    x, y = torch.randn(rows * n_microbatches, WIDTH), torch.randn(rows * n_microbatches, WIDTH)
    with _schedule(rank, size, group, name, n_microbatches, module) as schedule:
        module.most_outputs = module.most_objects = module.most_gradients = module.most_saved = 0
        module.outputs.clear()
        module.objects.clear()
        for _ in range(3):
            schedule.step(x, target=y, return_outputs=False)
        module.look()
        return {
            "outputs": module.most_outputs,
            "output objects": module.most_objects,
            "gradients": module.most_gradients,
            "saved bytes at most": module.most_saved,
            "saved bytes after a step": module.saved,
            "bytes of one microbatch": rows * WIDTH * 4,
        }


def _live_tensors() -> int:
    # isinstance() would ask lazy objects for their __class__.
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def census() -> dict[str, Any]:
    """Descriptors, threads, shared mappings and tensors of this process."""
    gc.collect()
    descriptors: dict[str, int] = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the listing's own descriptor
            continue
        kind = target.split(":")[0].split(" ")[0]
        descriptors[kind] = descriptors.get(kind, 0) + 1
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                names.append(comm.read().strip())
        except OSError:
            continue
    with open("/proc/self/maps") as maps:
        mappings = sum("memfd:" in line for line in maps)
    return {
        "descriptors": descriptors,
        "core threads": sum(name.startswith("pypipe") for name in names),
        "python threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("pypipe")),
        "shared mappings": mappings,
        "tensors": _live_tensors(),
    }


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What there is more of."""
    found = []
    for key, value in after.items():
        more = value > before[key] if isinstance(value, int) else value != before[key]
        if more:
            found.append(f"{key}: {before[key]} before, {value} after")
    return found


def many_steps(rank: int, size: int, group: Any, name: str, link: str) -> list[str]:
    """What grows from the 5th to the 55th step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    found: list[str] = []
    with _schedule(rank, size, group, name, 4, module, link) as schedule:
        x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        before: dict[str, Any] = {}
        for step in range(55):
            if step == 5:
                before = census()
                if link == "c10d":  # a sender makes its buffers, one for each slot at most, when it first needs them
                    before["tensors"] += 4 * 4
            losses: list[Tensor] = []
            schedule.step(x, target=y, losses=losses)
            if step % 10 == 0:
                schedule.eval(x[:4])
            module.zero_grad()
            del losses
        found += [f"rank {rank}: {text}" for text in differing(before, census())]
    return found


def gradients_of_slots(rank: int, size: int, group: Any) -> list[str]:
    """Whether a parameter's gradient lies in memory that is the link's."""
    torch.manual_seed(0)

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.randn(2, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.p.view(2, WIDTH)

    module = Adds()
    with _schedule(rank, size, group, "Schedule1F1B", 2, module) as schedule:
        schedule.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH))
        address = module.p.grad.data_ptr()  # type: ignore[union-attr]
        with open("/proc/self/maps") as maps:
            for line in maps:
                start, end = (int(text, 16) for text in line.split(" ")[0].split("-"))
                if "memfd:" in line and start <= address < end:
                    return [f"rank {rank}: a gradient lies in a slot: {line.strip()}"]
    return []


def slots_passed_on(rank: int, size: int, group: Any) -> list[str]:
    """Whether a gradient that goes through a stage as it came is taken for one that somebody keeps."""
    torch.manual_seed(0)
    module: nn.Module = nn.Identity() if 0 < rank < size - 1 else nn.Linear(WIDTH, WIDTH)
    with _schedule(rank, size, group, "Schedule1F1B", 6, module) as schedule:
        for _ in range(2):
            schedule.step(torch.randn(12, WIDTH), target=torch.randn(12, WIDTH))
        stages = schedule._pipeline._running.stages.values()
        lenders = [stage._gradients for stage in stages if stage._gradients is not None]
        return [f"rank {rank}: gradients are copied" for each in lenders if each._copies or each._tries]


def leftovers(rank: int, size: int, group: Any, how: str, link: str) -> list[str]:
    """What is left of schedules that were closed, dropped, or failed."""
    torch.manual_seed(0)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.armed = False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed and rank == 0:
                raise ValueError("on purpose")
            return self.linear(x)

    def once(module: Any) -> Any:
        schedule = _schedule(rank, size, group, "Schedule1F1B", 2, module, link)
        schedule.step(x, target=y)
        module.zero_grad()
        return schedule

    once(Fails()).close()  # whatever is made once and for all
    before = census()
    kept: list[Any] = []
    for _ in range(3):
        module = Fails()
        schedule = once(module)
        if how == "failed":
            module.armed = True
            try:
                schedule.step(x, target=y)
            except Exception:
                pass
            else:
                return [f"rank {rank}: step() did not raise"]
            schedule.close()
        elif how in ("closed", "closed but kept"):
            schedule.close()
        if how == "closed but kept":
            kept.append(schedule)
        del schedule, module
    after = census()
    if how == "closed but kept":
        after["tensors"] = before["tensors"]  # the modules' own
    return [f"rank {rank}, {how}: {text}" for text in differing(before, after)]
