"""What two processes on one GPU can show of the NCCL link. gpu.py runs these; on the emulator they run on CPU tensors.

Each function is called on both ranks and returns what is wrong, in words, and figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Findings = tuple[list[str], dict[str, float]]

WIDE = 16 << 20  # elements of a boundary: 64 MB in float32
DRY_WIDE = 1 << 16


def is_dry() -> bool:
    """Whether this is the emulator."""
    return "PYPIPE_GPU_DRY" in os.environ


def device() -> torch.device:
    """Where stages live; on a GPU without an index, as users write it."""
    return torch.device("cpu") if is_dry() else torch.device("cuda")


def _synchronize() -> None:
    if not is_dry():
        torch.cuda.synchronize()


class _Widen(nn.Module):
    """Makes a wide row of each number, and waits for the device in the middle of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._width = width

    def forward(self, x: Tensor) -> Tensor:
        _synchronize()
        return (x * self.weight).expand(x.shape[0], self._width).contiguous()


class _Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        _synchronize()
        return (x * self.weight).mean(dim=1, keepdim=True)


def _stage(rank: int, size: int, group: Any, module: nn.Module) -> Any:
    import pypipe

    module.to(device())
    return pypipe.PipelineStage(module, rank, size, device(), group=group)


def schedules(rank: int, size: int, group: Any) -> Findings:
    """Gradients of the unpipelined model, also where stages go round."""
    import transparency

    found = []
    names = ["ScheduleGPipe", "Schedule1F1B", "ScheduleLoopedBFS v=2", "ScheduleInterleavedZeroBubble v=2"]
    for name in names:
        found += transparency.compare(rank, size, group, name, "gpt", 4, 10, True, device=device())
    return found, {}


def wide_boundary(rank: int, size: int, group: Any) -> Findings:
    """A boundary of 64 MB, in stages that synchronize the device."""
    import pypipe

    stage = _stage(rank, size, group, _Mean() if rank else _Widen(DRY_WIDE if is_dry() else WIDE))
    schedule = pypipe.Schedule1F1B(stage, 8, nn.functional.l1_loss, timeout=30)
    x = torch.arange(1.0, 9.0, device=device())[:, None]
    target = torch.zeros(8, 1, device=device())
    start = time.perf_counter()
    for _ in range(3):
        schedule.step(x, target=target)
    _synchronize()
    seconds = (time.perf_counter() - start) / 3
    gradient = float(next(stage.submod.parameters()).grad)
    schedule.close()
    wanted = 3 * 4.5 * (1 if rank else 2)  # d mean(|2 w x|) / dw of three steps
    wrong = [] if abs(gradient - wanted) < 1e-3 else [f"rank {rank}: the gradient is {gradient}, not {wanted}"]
    return wrong, {"seconds_a_step": seconds}


def eval_memory(rank: int, size: int, group: Any) -> Findings:
    """The most memory of an eval() with 8 and with 64 microbatches of one size."""
    import pypipe

    figures = {}
    for count in (8, 64):
        stage = _stage(rank, size, group, nn.Linear(1024, 1024))
        schedule = pypipe.ScheduleGPipe(stage, count, timeout=30)
        x = torch.zeros(64 * count, 1024, device=device())
        schedule.eval(x, return_outputs=False)
        if not is_dry():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            schedule.eval(x, return_outputs=False)
            torch.cuda.synchronize()
            figures[f"bytes_of_{count}"] = float(torch.cuda.max_memory_allocated() - before)
        schedule.close()
    few, many = figures.get("bytes_of_8", 0.0), figures.get("bytes_of_64", 0.0)
    return ([f"rank {rank}: {many:.0f} bytes of 64, {few:.0f} of 8"] if many > 1.5 * few else []), figures


def captured_stage(rank: int, size: int, group: Any) -> Findings:
    """A stage that is a CUDA graph, and so returns one buffer again and again; captured beside a live pipeline."""
    import pypipe

    first = pypipe.ScheduleGPipe(_stage(rank, size, group, nn.Linear(64, 64)), 4, timeout=30)
    x = torch.randn(32, 64, device=device())
    first.eval(x)
    torch.manual_seed(0)
    module: Any = nn.Linear(64, 64).to(device())
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(size))).to(device())
    for layer in plain:
        layer.load_state_dict(module.state_dict())
    if not is_dry():
        module = torch.cuda.make_graphed_callables(module, (torch.randn(8, 64, device=device()),))
    second = pypipe.ScheduleGPipe(_stage(rank, size, group, module), 4, timeout=30)
    x = torch.linspace(0, 1, 32 * 64, device=device()).reshape(32, 64)
    module.eval()
    wrong = []
    for _ in range(3):
        got = second.eval(x)
        if got is not None and not torch.allclose(got, plain(x), atol=1e-4):
            wrong.append(f"rank {rank}: the output of a captured stage differs")
    second.close()
    first.close()
    return wrong, {}


class _Dies(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 64)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 11:
            os._exit(9)
        return super().forward(x)


def killed_rank(rank: int, size: int, group: Any) -> Findings:
    """Rank 1 dies in the middle of a step. The other one says so, and how long that took."""
    import pypipe

    stage = _stage(rank, size, group, _Dies() if rank else nn.Linear(64, 64))
    schedule = pypipe.Schedule1F1B(stage, 8, nn.functional.mse_loss, timeout=60)
    x = torch.randn(64, 64, device=device())
    start = time.perf_counter()
    try:
        for _ in range(3):
            start = time.perf_counter()
            schedule.step(x, target=x)
    except pypipe.PipelineError as error:
        seconds = time.perf_counter() - start
        wrong = [] if "rank 1" in str(error) else [f"rank {rank} said {error}"]
        return wrong + ([f"it took {seconds:.1f} s"] if seconds > 30 else []), {"seconds_until_told": seconds}
    finally:
        schedule.close()
    return ["rank 1 died, and no error was raised"], {}


# The last one leaves a dead rank behind.
PARTS: dict[str, Callable[[int, int, Any], Findings]] = {
    each.__name__: each for each in (schedules, wide_boundary, eval_memory, captured_stage, killed_rank)
}
