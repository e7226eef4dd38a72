"""torchtitan on CPUs: what it expects of a GPU, data, and its debug model in a size that CPUs train in seconds."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["import_torchtitan", "trainer_config"]

SEQ_LEN = 16
VOCABULARY = 2048


_modules: list[Any] = []


def import_torchtitan() -> Any:
    """torchtitan.trainer, with pypipe behind torch's names or, with PIPELINING_OF_TORCHTITAN=torch, torch itself."""
    if not _modules:
        _modules.append(_import(os.environ["PIPELINING_OF_TORCHTITAN"]))
    return _modules[0]


def _import(lib: str) -> Any:
    if lib == "pypipe":
        from pypipe.compat import install

        install()
    else:
        _take_microbatches()
    # torchtitan asks for the accelerator once, as it is imported; without one it takes CUDA for granted.
    torch._utils._get_available_device_type = lambda: "cpu"
    import torchtitan.components.metrics as metrics
    import torchtitan.trainer
    from torchtitan.distributed import utils

    metrics.build_device_memory_monitor = _NoMemoryMonitor
    utils.set_pg_timeouts = lambda *_, **__: None  # its barrier names a GPU
    torchtitan.trainer.time = _Clock
    return torchtitan.trainer


def _take_microbatches() -> None:
    """torchtitan's trainer gives step() microbatches, which torch's takes from releases after 2.13 on only.

    It calls what step() calls with the microbatches that it has cut.
    """
    from torch.distributed.pipelining import schedules

    def step(
        self: Any,
        *,
        target: None = None,  # which eval() passes on
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: Any = None,
        return_outputs: bool = True,
        loss_kwargs: Any = None,
    ) -> None:
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(
            arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs=return_outputs, loss_kwargs=loss_kwargs
        )

    for cls in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        cls.step = step  # type: ignore[assignment, method-assign]


class _Clock:
    """Without the two seconds that the trainer gives other ranks for their last lines."""

    perf_counter = staticmethod(time.perf_counter)

    @staticmethod
    def sleep(_seconds: float) -> None:
        pass


class _NoMemoryMonitor:
    """A GPU's memory, which torchtitan reports."""

    device_name = "CPU"

    def get_peak_stats(self) -> Any:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def _data_loader() -> Any:
    """torchtitan's data come from the hub; these are random tokens, the same for both libraries."""
    from torchtitan.components.dataloader import BaseDataLoader

    class RandomTokens(BaseDataLoader):  # type: ignore[misc]
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):  # type: ignore[misc]
            infinite: bool = True

        def __init__(self, config: Any, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
            self._shape = (local_batch_size, seq_len + 1)
            self._generator = torch.Generator().manual_seed(100 + dp_rank)

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                tokens = torch.randint(VOCABULARY, self._shape, generator=self._generator)
                positions = torch.arange(self._shape[1] - 1).expand(self._shape[0], -1).contiguous()
                yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    return RandomTokens.Config()


def _no_tokenizer() -> Any:
    """In place of the files of a tokenizer: the data are tokens already."""
    from torchtitan.config import Configurable

    class NoTokenizer(Configurable):  # type: ignore[misc]
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            pass

    return NoTokenizer.Config()


def trainer_config(
    folder: str,
    schedule: str,
    *,
    pp: int,
    fsdp: int,
    recompute: bool = True,
    chunked: bool = False,
    validate: bool = False,
    csv: str | None = None,
) -> Any:
    """torchtitan's configuration of its debug model, with what needs the network or a GPU left out.

    Args:
        folder: where it may write.
        schedule: its name.
        pp, fsdp: ranks of a pipeline, and pipelines, over which parameters are sharded.
        recompute: selective activation checkpointing, which the debug model has.
        chunked: the debug model's loss, which computes the head and runs its backward chunk by chunk.
        validate: runs the validator after the first step.
        csv: the file of a program in the schedule's place.
    """
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    for layer in config.model_spec.model.layers:  # FlexAttention has no backward on CPUs; each row is one document here
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if not chunked:
        config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    if not recompute:
        config.activation_checkpoint = None
    config.dump_folder = folder
    config.training.local_batch_size = 4
    config.training.seq_len = SEQ_LEN
    config.training.steps = 2
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.parallelism.pipeline_parallel_schedule = schedule
    config.parallelism.pipeline_parallel_schedule_csv = csv
    config.parallelism.pipeline_parallel_degree = pp
    config.parallelism.data_parallel_shard_degree = fsdp
    if fsdp > 1:  # the default backend gives fully_shard plain tensors, which it refuses in torch 2.13
        config.parallelism.spmd_backend = "partial_dtensor"
    config.dataloader, config.tokenizer = _data_loader(), _no_tokenizer()
    config.checkpoint.enable = False
    config.validator.enable = validate
    if validate:
        config.validator.freq, config.validator.steps, config.validator.dataloader = 1, 1, _data_loader()
    config.debug.seed = 1234
    return config
