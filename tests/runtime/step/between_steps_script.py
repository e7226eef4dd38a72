"""Run under torchrun, without a process group: what ranks decide together between steps. Argument: what happens."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import pypipe

case, rank = sys.argv[1], int(os.environ["RANK"])
torch.manual_seed(0)
weight = torch.randn(4, 4)
module = nn.Linear(4, 4)
with torch.no_grad():
    module.weight.copy_(weight)
pypipe.tie(module.weight, "weight")
stage = pypipe.PipelineStage(module, rank, 2, "cpu")
schedule = pypipe.Schedule1F1B(stage, 2, nn.functional.mse_loss, timeout=60)
scaler = pypipe.GradScaler(schedule, init_scale=8.0)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
for _ in range(2):
    schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
    if rank == 1 and case == "dies":
        os._exit(0)
    try:
        scaler.unscale_(optimizer)
    except pypipe.PeerLost as error:
        print(f"PeerLost: {error}")
        sys.exit(0)
    norm = schedule.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
schedule.close()
print(f"norm {float(norm)!r} weight {module.weight.detach().flatten().tolist()}")
