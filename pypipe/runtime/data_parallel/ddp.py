"""DistributedDataParallel, and replicate(), in a stage.

DDP's reducer counts calls of its parameter hooks: armed by a forward, it reduces a bucket once the hook of each of the
bucket's parameters has been called. Here it is not armed while microbatches run. At REDUCE_GRAD it is, and its hooks
are called by hand, inside an engine run that does nothing else, since the reducer finishes in a callback of the engine.
So hooks of the user's do not run twice, and a parameter counts as used if any microbatch has given it a gradient.

Gradients of earlier steps that are still in `.grad` are averaged again. If they were reduced, that changes nothing:
they are the same on all replicas.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.parallel import DistributedDataParallel

from pypipe.errors import InputError
from pypipe.runtime.autograd.engine import run_backward
from pypipe.runtime.data_parallel.foreign_ranks import foreign_ranks
from pypipe.runtime.data_parallel.replica_failure import Reductions

__all__ = ["Replicated"]


class Replicated:
    """One DistributedDataParallel.

    Args:
        owner: the module that is wrapped, or the wrapper where it is a module.
        state: what holds the flag that says whether the next backward reduces, and how it is called and read.
    """

    shards = False
    moves_gradients = False

    def __init__(self, owner: nn.Module, state: Any, ddp: Callable[[], DistributedDataParallel], flag: _Flag) -> None:
        self._owner = owner
        self._state = state
        self._get_ddp = ddp
        self._flag = flag
        self._syncs: bool | None = None  # what the user wants; None: between steps
        self._first_static = False
        self._used: list[int] | None = None  # with static_graph, what the first step used
        self._static_calls: dict[int, int] = {}  # and how often the reducer expects each one's hook
        self._took_part = False  # in this step's reduction, even if that has failed
        self._is_reduced = False
        self._reductions: Reductions | None = None

    @classmethod
    def by_ddp(cls, module: DistributedDataParallel) -> Replicated:
        """For a module that is wrapped."""
        return cls(module, module, lambda: module, _Flag("require_backward_grad_sync", means_sync=True))

    @classmethod
    def by_replicate(cls, module: nn.Module, state: Any) -> Replicated:
        """For a module to which `torch.distributed._composable.replicate` was applied; its DDP comes in a forward."""

        def ddp() -> DistributedDataParallel:
            if state._init_args or state._init_kwargs:
                state.lazy_init()
            made: DistributedDataParallel = state._ddp
            return made

        return cls(module, state, ddp, _Flag("_no_sync", means_sync=False))

    def identity(self) -> int:
        """See Wrapper."""
        return id(self._state)

    def problem(self, others: frozenset[int]) -> str | None:
        """See Wrapper."""
        if not hasattr(getattr(torch.distributed, "Reducer", None), "_autograd_hook"):
            return (
                f"DistributedDataParallel in a stage: torch {torch.__version__} lacks what that needs: use a newer one"
            )
        for attribute, what, remedy in _REFUSED:
            if _truth(self._state, attribute):
                return f"DistributedDataParallel with {what} in a stage: {remedy}"
        if isinstance(self._state, DistributedDataParallel):
            name, remedy = "DistributedDataParallel", "DistributedDataParallel(module, process_group=...)"
        else:
            name, remedy = "replicate", "replicate(module, process_group=...)"
        # DDP has sent one rank's parameters to the whole group as it was made.
        remedy += ", around a module made anew, since this one may have got another stage's parameters"
        return foreign_ranks(f"{name} would average the gradients of", self._ranks(), others, remedy)

    def _ranks(self) -> list[int]:
        """The global ranks among which gradients are reduced; asks no DDP of replicate()'s to be made."""
        ddp = self._state if isinstance(self._state, DistributedDataParallel) else getattr(self._state, "_ddp", None)
        if ddp is not None:
            group = ddp.process_group
        else:
            given = self._state._init_kwargs
            mesh = given.get("device_mesh")
            group = given.get("process_group") if mesh is None else mesh.get_group()
        return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)

    def begin(self, *, training: bool) -> None:
        """See Wrapper."""
        if not training:
            return
        ddp = self._get_ddp()
        if self._reductions is None:
            self._reductions = Reductions(torch.distributed.get_process_group_ranks(ddp.process_group))
        self._reductions.check_last()
        _parameters(ddp)  # before anything is added to .grad
        self._took_part = self._is_reduced = False
        self._syncs = self._flag.get(self._state)
        self._flag.set(self._state, False)
        if ddp.static_graph:
            _in_step.add(ddp)
        if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
            # Else the first microbatch's backward would enqueue the reduction.
            self._first_static = ddp._static_graph_delay_allreduce_enqueued = True

    def unshard(self) -> None:
        """Nothing: parameters are whole."""

    def after_backward(self) -> None:
        """Nothing: gradients stay in `.grad`."""

    def reduce(self) -> None:
        """See Wrapper.

        Raises:
            InputError: a parameter has no gradient on this replica, and DDP was not told that this may be.
            PipelineError: a replica had failed.
        """
        if not self._syncs:
            return
        assert self._reductions is not None
        key = self._reductions.begin()
        called, with_gradient = self._reduce()
        ddp = self._get_ddp()
        parameters = _parameters(ddp)
        self._reductions.check(key, next((p.grad for p in parameters if p.grad is not None), None))
        if len(called) > len(with_gradient) and not (ddp.static_graph or ddp.find_unused_parameters):
            raise InputError(_unused(ddp, set(called) - set(with_gradient)))

    def forward_failed(self) -> None:
        """See Wrapper."""
        if self._syncs is None:
            return
        ddp: Any = self._get_ddp()
        ddp.reducer._rebuild_buckets()  # which the first forward after the first reduction does, and no later one
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_buffers()
            ddp.require_forward_param_sync = False  # as after a forward without a reduction

    def reduce_failed(self, reason: str) -> None:
        """See Wrapper."""
        if not self._syncs or self._took_part:
            return
        assert self._reductions is not None
        self._reductions.tell(self._reductions.begin(), reason)
        ddp = self._get_ddp()
        parameters = _parameters(ddp)
        # What the error says of .grad stays true.
        views = ddp.gradient_as_bucket_view
        own = [p.grad.clone() if views and p.grad is not None else p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, torch.nan)
        self._reduce()
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient

    def _reduce(self) -> tuple[list[int], list[int]]:
        """The reduction; returns whose hooks were called, and which parameters had a gradient, by number."""
        self._took_part = True
        ddp = self._get_ddp()
        reducer: Any = ddp.reducer  # torch's stubs leave out what is private
        parameters = _parameters(ddp)
        with_gradient = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
        if ddp.static_graph:
            if self._first_static or self._used is None:
                self._used = with_gradient
            called = sorted({*self._used, *with_gradient})
        elif ddp.find_unused_parameters:
            called = with_gradient or [0]  # one hook at least, or nothing is reduced
        else:
            called = list(range(len(parameters)))
        reducer.prepare_for_forward()
        with _without_advice():
            if ddp.find_unused_parameters and not ddp.static_graph:
                # The reducer looks in the graph behind these for parameters that are used.
                leads: Any = _Leads
                reducer.prepare_for_backward([leads.apply(*[parameters[i] for i in called])])
            else:
                reducer.prepare_for_backward([])

        def call_hooks() -> None:
            for index in reversed(called):  # the order of a backward, by which buckets are made anew
                if ddp.static_graph and not self._first_static:
                    self._call_static(reducer, index)
                else:
                    reducer._autograd_hook(index)
            if self._first_static:
                reducer._delay_all_reduce()

        _inside_engine(call_hooks)
        self._first_static = False
        # As after a forward of its own: buffers are sent out before the next one.
        ddp.require_forward_param_sync = True
        self._is_reduced = True
        return called, with_gradient

    def _call_static(self, reducer: Any, index: int) -> None:
        """Calls a hook as often as a static graph's reducer expects it.

        It expects what it counted in the first step. There some releases of torch also count the hooks of microbatches,
        for which the reducer was not armed, and others do not. It refuses one call too many: that shows which it is.
        """
        count = self._static_calls.get(index)
        if count is not None:
            for _ in range(count):
                reducer._autograd_hook(index)
            return
        count = 0
        while True:
            try:
                reducer._autograd_hook(index)
            except RuntimeError as error:
                if "graph has changed" not in str(error):
                    raise
                break
            count += 1
        if count == 0:
            raise InputError(
                "a parameter that had no gradient in the first step has one now, but DistributedDataParallel was told "
                "static_graph=True: leave that out"
            )
        self._static_calls[index] = count

    def reshard(self) -> None:
        """Nothing: parameters stay whole."""

    def end(self) -> None:
        """See Wrapper."""
        syncs, self._syncs = self._syncs, None
        if syncs is None:
            return
        self._flag.set(self._state, syncs)
        ddp = self._get_ddp()
        if ddp.static_graph:
            _in_step.discard(ddp)
            if self._used is not None and ddp not in _guarded:
                _guarded.add(ddp)
                self._owner.register_forward_pre_hook(
                    functools.partial(_refuse_outside, weakref.ref(ddp)), prepend=True
                )
        if self._first_static:  # it has not come to its reduction
            self._get_ddp()._static_graph_delay_allreduce_enqueued = self._first_static = False

    def abandon(self) -> str | None:
        """See Wrapper."""
        if not self._syncs or self._is_reduced:
            return None
        return ".grad is not reduced among its replicas"


_in_step: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # those with a static graph, while a step runs
_guarded: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _refuse_outside(ddp: weakref.ref[DistributedDataParallel], _module: nn.Module, _args: Any) -> None:
    """The reducer would wait for as many hooks as a whole step's microbatches have called, and reduce nothing."""
    if torch.is_grad_enabled() and ddp() not in _in_step:
        raise InputError(
            "this module is in DistributedDataParallel with static_graph=True, and a schedule has trained it: its "
            "static graph is a whole step of that schedule, so a backward outside would not be reduced. Train it in "
            "schedules only, or leave static_graph out; under torch.no_grad() it may be called"
        )


class _Flag:
    """Whether the next backward reduces: an attribute, which says so or the opposite."""

    def __init__(self, name: str, *, means_sync: bool) -> None:
        self._name = name
        self._means_sync = means_sync

    def get(self, state: Any) -> bool:
        return bool(getattr(state, self._name)) is self._means_sync

    def set(self, state: Any, syncs: bool) -> None:
        setattr(state, self._name, syncs is self._means_sync)


# What DDP can do besides, and acts by itself in each backward.
_REFUSED = (
    ("_use_python_reducer", "the Python reducer", 'leave torch._dynamo.config.optimize_ddp="python_reducer" out'),
    ("mixed_precision", "mixed_precision=", "use torch.autocast in the stage's forward, or fully_shard's mp_policy"),
    ("_delay_all_reduce_params", "delayed all-reduces", "leave delay_all_reduce_named_params out"),
    ("_join_config.enable", "join()", "give all replicas the same number of steps"),
)


def _truth(state: Any, path: str) -> bool:
    for name in path.split("."):
        state = getattr(state, name, None)
    return bool(state)


def _parameters(ddp: DistributedDataParallel) -> Sequence[Tensor]:
    """Those that the reducer reduces, by its numbers.

    Raises:
        InputError: others require a gradient now than when the reducer was made.
    """
    untyped: Any = ddp
    listed: Sequence[Tensor] = getattr(ddp, "_module_parameters", None) or list(ddp.module.parameters())
    parameters = [parameter for parameter in listed if parameter.requires_grad]
    count = int(untyped._get_ddp_logging_data()["num_parameter_tensors"])
    if len(parameters) != count:
        raise InputError(
            f"{len(parameters)} parameters require a gradient, but {count} did when DistributedDataParallel was built, "
            "and those it reduces: freeze and unfreeze before, or wrap the module anew and build a new schedule"
        )
    return parameters


class _Leads(torch.autograd.Function):
    """A tensor whose graph leads to these parameters; nothing runs backward through it."""

    @staticmethod
    def forward(_ctx: Any, *parameters: Tensor) -> Tensor:
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("this graph is only looked at")


def _inside_engine(function: Callable[[], None]) -> None:
    """Calls a function in a run of autograd's engine, and then the callbacks that it has queued there."""
    with torch.inference_mode(False), torch.enable_grad():
        zero = torch.zeros(())
        node = torch.zeros((), requires_grad=True).view(()).grad_fn
    assert node is not None
    node.register_prehook(lambda _: function())
    run_backward((GradientEdge(node, 0),), (zero,))


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Silences DDP where it says that all parameters were used though it was told to look for unused ones.

    It looks at one step's M microbatches at once, of which that is to be expected.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*find_unused_parameters=True was specified")
        yield


def _unused(ddp: DistributedDataParallel, indices: set[int]) -> str:
    numbers = {id(parameter): i for i, parameter in enumerate(_parameters(ddp))}
    names = [name for name, p in ddp.module.named_parameters() if numbers.get(id(p)) in indices]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"no loss of this step depends on {shown or 'some parameters'}, and DistributedDataParallel was not told that "
        "this may be: pass find_unused_parameters=True to it, or freeze them with requires_grad_(False). For the "
        "other replicas their gradients of this step were zeros here"
    )
