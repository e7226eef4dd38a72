"""The links: shared memory, NCCL, torch.distributed."""
