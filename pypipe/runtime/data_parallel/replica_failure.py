"""Tells the replicas of a stage that one replica's pipeline has failed.

Each replica waits in its next reduction for all the others. So a rank whose step has failed takes part in the step's
remaining reductions, with NaN for its gradients: no replica waits in vain, and the next step's reductions match. Before
that it writes the reason into the store. A replica that finds NaN in a reduced gradient looks there, and raises.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pypipe.errors import PipelineError
from pypipe.runtime.tensor_memory import memory_parts
from pypipe.runtime.torch_private import default_store

__all__ = ["Reductions"]

_counts: dict[str, int] = {}  # reductions of each set of replicas; all of a set count alike


class Reductions:
    """The reductions of one wrapper.

    Args:
        ranks: the global ranks of the replicas.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._name = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:32]
        self._unread: tuple[str, Tensor, Any] | None = None

    def begin(self) -> str:
        """Begins a reduction; returns the key under which a replica that fails says so."""
        count = _counts[self._name] = _counts.get(self._name, 0) + 1
        return f"pypipe/failed-replica/{self._name}/{count}"

    def tell(self, key: str, reason: str) -> None:
        """Says that this replica has failed. Done before it takes part in the reduction."""
        default_store().set(key, json.dumps({"rank": dist.get_rank(), "reason": reason}))

    def check(self, key: str, gradient: Tensor | None) -> None:
        """Looks whether all replicas have taken part with gradients.

        On an accelerator the values are not there yet: the next step looks.

        Args:
            key: from begin().
            gradient: one that has been reduced; None: this rank has none that tells.

        Raises:
            PipelineError: one had failed.
        """
        part = next((part for part in memory_parts(gradient) if part.numel()), None) if gradient is not None else None
        if part is None:
            _raise_if_told(key)
            return
        flag = torch.isnan(part.detach().as_strided((1,), (1,)))
        if flag.device.type == "cpu":
            if flag.item():
                _raise_if_told(key)
            return
        event = torch.get_device_module(flag.device).Event()
        self._unread = key, flag.to("cpu", non_blocking=True), event
        event.record()

    def check_last(self) -> None:
        """Looks at the last step's reduction, where that could not be done at once."""
        unread, self._unread = self._unread, None
        if unread is not None:
            key, flag, event = unread
            event.synchronize()
            if flag.item():
                _raise_if_told(key)


def _raise_if_told(key: str) -> None:
    store = default_store()
    if not store.check([key]):
        return
    told = json.loads(store.get(key))
    raise PipelineError(
        f"the gradients of this stage are not reduced: another replica of the pipeline failed in this step, on global "
        f"rank {told['rank']}: {told['reason']}. They are NaN now: call zero_grad() before you go on, on every replica"
    )
