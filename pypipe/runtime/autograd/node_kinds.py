"""What a node's class tells of it: which of torch's operations it is, and what that operation's backward can do."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.autograd.function import BackwardCFunction

from pypipe.runtime.autograd.saved_tensors import saves
from pypipe.runtime.autograd.split_graph import AccumulateGrad

__all__ = ["ELEMENTWISE", "LOOKUPS", "VIEWS", "NodeKind", "kind_of"]

# Nodes of torch's own operations; their names end in a number.
_OPERATION = re.compile(r"(\w+)Backward\d+")

# Operations that compute several gradients at once even if one is asked for (derivatives.yaml: formulas of several
# inputs without a mask; cuDNN's batch norm and RNN ignore theirs).
_JOINT = {
    *("CudnnBatchNorm", "CudnnRnn", "MiopenBatchNorm", "MiopenRnn", "MkldnnRnnLayer", "LstmMps"),
    *("ThnnFusedLstmCell", "ThnnFusedGruCell", "PreluKernel", "WeightNormInterface", "ConvTbc", "EuclideanDist"),
    *("Polar", "IndexReduce", "ScatterReduce", "GridSampler2DCpuFallback", "CudnnGridSampler"),
    *("LinalgHouseholderProduct", "FakeQuantizeLearnablePerTensorAffine", "FakeQuantizeLearnablePerChannelAffine"),
    *("EfficientAttention", "FlashAttention", "CudnnAttention", "ScaledDotProductCudnnAttention"),
    *("ScaledDotProductFlashAttention", "ScaledDotProductFlashAttentionForCpu"),
}
# Operations that pick rows of a weight by data that needs no gradient.
LOOKUPS = {"Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "Take"}
# Operations, and edges whose gradients never have to be summed up to the shape of what they are for.
_EXACT = {
    **dict.fromkeys(("Mm", "Bmm", "Embedding"), (0, 1)),
    **dict.fromkeys(("Addmm", "Baddbmm", "Convolution"), (1, 2)),
    **dict.fromkeys(("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm"), (1, 2)),
}
VIEWS = {"T", "Transpose", "Permute", "View"}
ELEMENTWISE = {"Add", "Sub", "Rsub", "Mul", "Div", "Pow"}

# Functions whose backward refuses to run for a part of the graph, or a graph that is kept.
_WHOLE = {
    "CompiledFunctionBackward": "a compiled graph computes all its gradients at once",
    "CheckpointFunctionBackward": "reentrant activation checkpointing runs whole backwards only",
}


@dataclass(slots=True)
class NodeKind:
    """What a node's class tells.

    Attributes:
        leaf: whether such a node adds to a leaf's `.grad`.
        operation: which of torch's operations it is, or None.
        joint: why it cannot compute the gradients of its weights apart, or None.
        whole: why it can be run by full backwards only, or None.
        saves: whether it may save tensors.
        exact: positions of the edges whose gradients never have to be summed up to the shape of what they are for.
    """

    leaf: bool
    operation: str | None
    joint: str | None
    whole: str | None
    saves: bool
    exact: tuple[int, ...]

    @property
    def function(self) -> bool:
        """Whether it is a function of the user's, not one of torch's operations."""
        return self.operation is None and not self.leaf


_kinds: dict[type, NodeKind] = {}


def kind_of(kind: type) -> NodeKind:
    """What a node's class tells; looked up once a class."""
    known = _kinds.get(kind)
    if known is not None:
        return known
    match = _OPERATION.fullmatch(kind.__name__)
    operation = match[1] if match and not issubclass(kind, BackwardCFunction) else None
    joint = None
    if operation is None or operation in _JOINT:
        joint = f"{operation or kind.__name__.removesuffix('Backward')} computes all its gradients at once"
    made = _kinds[kind] = NodeKind(
        leaf=kind is AccumulateGrad,
        operation=operation,
        joint=joint,
        whole=_WHOLE.get(kind.__name__),
        saves=saves(kind),
        exact=_EXACT.get(operation or "", ()),
    )
    return made
