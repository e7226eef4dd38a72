"""A script over c10d, run as one rank of a job: a step fails, the script catches the error and ends in good order."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from typing import Any


def _say_what_is_left() -> None:
    left = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
    print("left:", left, flush=True)


if __name__ == "__main__":
    # Hooks run in the reverse order of their registration: this one after all of pypipe's.
    atexit.register(_say_what_is_left)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from c10d_failures import Sent  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import pypipe  # noqa: E402

WAYS = ("plain", "close", "collected", "no destroy", "lost bytes", "lost bytes and close", "second failure")


class Fails(nn.Module):
    """Raises in its second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("on purpose")
        return self.linear(x)


def _fail_a_step(rank: int, size: int, kind: str) -> Any:
    module = Fails() if rank == 1 else nn.Linear(4, 4)
    stage = pypipe.PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = getattr(pypipe, kind)(stage, 4, loss_fn=nn.functional.mse_loss, timeout=20.0)
    try:
        schedule.step(torch.ones(8, 4), target=torch.zeros(8, 4))
    except (ValueError, pypipe.RemoteStageError) as error:
        print("caught", type(error).__name__, flush=True)
    return schedule


def main(way: str, kind: str) -> None:
    """Fails, looks whether the process group still works, and ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if way.startswith("lost bytes") and rank == 1:
        isend: Any = lambda *_, **__: Sent()  # noqa: E731
        dist.isend = isend  # announced, and never sent: who receives them waits for ever
    schedule = _fail_a_step(rank, size, kind)
    if way in ("close", "lost bytes and close"):
        schedule.close()
    if way == "second failure":
        schedule = [schedule, _fail_a_step(rank, size, kind)]
    if way == "collected":
        del schedule
        gc.collect()
    total = torch.full((3,), float(rank))
    dist.all_reduce(total)
    dist.barrier()
    print("sum", total.tolist(), flush=True)
    if way != "no destroy":
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["PYPIPE_LINK"] = "c10d"
    main(sys.argv[1], sys.argv[2])
