"""Replicated, sharded, tensor-parallel and tied stages over a link that is asked for."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import data_parallel_cases
import nccl_cases
import tensor_parallel_cases
import ties_cases

STAGES: dict[str, Any] = {"data": data_parallel_cases, "tensor": tensor_parallel_cases, "ties": ties_cases}


def train_many(rank: int, size: int, group: Any, link: str, kind: str, cases: list[Any]) -> list[str]:
    """What differs from the unpipelined model; over NCCL (emulated) also accesses that nothing orders."""
    train = STAGES[kind].train_many
    if link != "nccl":
        with patch.dict(os.environ, {"PYPIPE_LINK": link}):
            found: list[str] = train(rank, size, group, cases)
            return found
    emulator, compute = nccl_cases.control(), nccl_cases.compute_stream()
    emulator.reset_counters()
    emulator.set("seed", rank)
    with compute.installed():
        found = train(rank, size, group, cases)
    emulator.settle(compute.handle)
    return found + nccl_cases.hazards(emulator, rank)
