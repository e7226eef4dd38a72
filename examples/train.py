"""Trains a small model, one stage on each rank: torchrun --nproc-per-node 4 examples/train.py."""

import torch
import torch.distributed as dist
from torch import nn

from pypipe import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
widths = [32] + [64] * (size - 1) + [1]  # stage i maps widths[i] to widths[i + 1]
module = nn.Sequential(nn.Tanh(), nn.Linear(widths[rank], widths[rank + 1]))
stage = PipelineStage(module, stage_index=rank, num_stages=size, device=torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(0)  # the same batch on every rank; the first and the last use it
for step in range(50):
    x = torch.randn(64, 32, generator=data)
    losses: list[torch.Tensor] = []
    schedule.step(x, target=x.mean(dim=1, keepdim=True), losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    if rank == size - 1:
        print(f"step {step}: loss {torch.stack(losses).mean():.4f}")
schedule.close()
dist.destroy_process_group()
