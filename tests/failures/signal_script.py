"""Trains for ever, as one rank of torchrun's environment: prints a line when it is under way."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
from torch import nn

import pypipe


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "--deaf" in sys.argv:  # what it says of a dead peer shall not be cut short by a launcher that has noticed too
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    stage = pypipe.PipelineStage(nn.Linear(8, 8), rank, size, torch.device("cpu"))
    schedule = pypipe.Schedule1F1B(stage, 4, nn.functional.mse_loss, timeout=60.0)
    batch = torch.randn(8, 8)
    parent = os.getppid()
    for step in range(10**9):
        if os.getppid() != parent:
            os._exit(1)  # a test has failed, and has killed the launcher alone
        schedule.step(batch, target=batch)
        if step == 5 and "--raise" in sys.argv and rank == 1:
            raise LookupError("the data are gone")
        if step == 3:
            os.write(1, b"training\n")  # print() may write the end of a line apart from it
        if step > 3 and "--wait" in sys.argv and rank == 1:
            threading.Event().wait()  # the others wait for it


if __name__ == "__main__":
    main()
