"""Replicated and sharded stages: two pipelines of two ranks (or four of one) against one model on all their batches."""

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transparency
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")
WIDTH = 6
SPARSE = ("find_unused", "static_unused")  # kinds of wrapper whose stages leave a parameter out


class Piece(nn.Module):
    """A stage with a frozen parameter, and one whose gradient may be the received gradient itself.

    That is so where a microbatch has one row. A sparse one also has a parameter that some microbatches use and one that
    none does.
    """

    def __init__(self, sparse: bool, static: bool) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(WIDTH, WIDTH)
        second = nn.Linear(WIDTH, WIDTH)
        second.bias.requires_grad_(False)
        self.second: nn.Module = second
        self.shift = nn.Parameter(torch.randn(1, WIDTH))
        self.sparse, self.static = sparse, static
        self.checkpointed = False
        if sparse:
            self.sometimes = nn.Parameter(torch.randn(WIDTH))
            self.never = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)

    def layers(self, x: Tensor) -> Tensor:
        """The stage, without or within activation checkpointing."""
        y = self.second(torch.tanh(self.first(x))) + self.shift
        if self.sparse and (self.static or float(x.detach().sum()) > 0):
            y = y * self.sometimes
        return y


class Counted(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.calls[function._schema.name.removeprefix("c10d::")] += 1
        return function(*args, **(kwargs or {}))

    def take(self) -> dict[str, int]:
        found, self.calls = dict(self.calls), Counter()
        return found


class Case(NamedTuple):
    """One comparison. `rows` are a replica's; `pipeline` is the number of ranks in each pipeline."""

    schedule: str
    wrapper: str
    n_microbatches: int
    rows: int
    pipeline: int = 2


_meshes: dict[int, DeviceMesh] = {}


def mesh_of(size: int, pipeline: int) -> DeviceMesh:
    """All ranks, as replicas x pipeline; made once a process, since groups stay."""
    if pipeline not in _meshes:
        shape = (size // pipeline, pipeline)
        _meshes[pipeline] = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    return _meshes[pipeline]


# DDP reads a hook's annotations, and wants types, not their text: so this file does not postpone their evaluation.
def _mean_hook(group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP does by itself, as a hook."""
    tensor = bucket.buffer().div_(group.size())
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    mean: torch.futures.Future[Tensor] = future.then(lambda done: done.value()[0])
    return mean


def wrap(module: Piece, wrapper: str, mesh: DeviceMesh) -> nn.Module:
    """The module as a trainer would wrap it."""
    data = mesh["dp"]
    group = data.get_group()
    ddp: dict[str, Any] = {}
    if wrapper.endswith("_checkpoint"):
        module.checkpointed = True
        wrapper = wrapper.removesuffix("_checkpoint")
    match wrapper:
        case "ddp" | "hook" | "buffers" | "ddp_inside":
            pass
        case "bucket_view":
            ddp["gradient_as_bucket_view"] = True
        case "static" | "static_unused":
            ddp["static_graph"] = True
        case "find_unused":
            ddp["find_unused_parameters"] = True
        case "replicate":
            from torch.distributed._composable.replicate import replicate

            replicate(module, process_group=group)
            return module
        case "fsdp_replicate":  # replicate() of newer releases of torch is fully_shard's machinery without shards
            from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp

            replicate_by_fsdp(module, mesh=data)
            return module
        case "fsdp":
            fully_shard(module, mesh=data)
            return module
        case "fsdp_nested":
            fully_shard(module.first, mesh=data)
            fully_shard(module.second, mesh=data)
            fully_shard(module, mesh=data)
            return module
        case "fsdp_inside":  # two roots, and parameters that nothing shards
            fully_shard(module.first, mesh=data)
            fully_shard(module.second, mesh=data)
            return module
        case "hsdp":
            fully_shard(module, mesh=_hybrid())
            return module
    if wrapper == "ddp_inside":
        module.first = DistributedDataParallel(module.first, process_group=group)
        module.second = DistributedDataParallel(module.second, process_group=group)
        return module
    wrapped = DistributedDataParallel(module, process_group=group, **ddp)
    if wrapper == "hook":
        wrapped.register_comm_hook(group, _mean_hook)
    return wrapped


def _hybrid() -> DeviceMesh:
    if 0 not in _meshes:
        _meshes[0] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _meshes[0]


def whole(value: Tensor) -> Tensor:
    """A gradient or parameter as one tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@contextlib.contextmanager
def no_sync(modules: list[nn.Module]) -> Iterator[None]:
    """No reduction in these modules, as each wrapper spells it."""
    with contextlib.ExitStack() as stack:
        for part in [part for module in modules for part in module.modules()]:
            if isinstance(part, DistributedDataParallel):
                stack.enter_context(part.no_sync())
            elif hasattr(part, "set_requires_gradient_sync"):
                sync: Any = part.set_requires_gradient_sync
                sync(False)
                stack.callback(sync, True)
        yield


class Replicas:
    """One rank's part, and the model that all of it is compared with."""

    def __init__(self, rank: int, size: int, case: Case, **options: Any) -> None:
        self.case, self.rank = case, rank
        self.mesh = mesh_of(size, case.pipeline)
        self.replica, self.n_replicas = divmod(rank, case.pipeline)[0], size // case.pipeline
        self.place = rank % case.pipeline
        count = transparency.count_stages(case.schedule, case.pipeline)
        with torch.random.fork_rng([]):
            torch.manual_seed(7)
            sparse = case.wrapper in SPARSE
            pieces = [Piece(sparse, case.wrapper == "static_unused").double() for _ in range(count)]
        if case.wrapper == "buffers":  # DDP sends them to all replicas before a step's first forward
            for piece in pieces:
                piece.register_buffer("unused", torch.zeros(2))
        self.reference = copy.deepcopy(pieces)
        self.partial = case.wrapper in ("ddp_inside", "fsdp_inside")
        held = transparency.pieces_of(case.schedule, self.place, case.pipeline)
        self.modules = [
            wrap(piece, case.wrapper, self.mesh) if number in held else piece for number, piece in enumerate(pieces)
        ]
        built = transparency.build(
            self.place,
            case.pipeline,
            self.mesh["pp"].get_group(),
            case.schedule,
            self.modules,
            case.n_microbatches,
            loss_fn=functional.mse_loss,
            timeout=30,
            **options,
        )
        self.schedule, self.held = built.schedule, built.held
        self.differences: list[str] = []
        self.optimizer = torch.optim.SGD([p for _, m in self.held for p in m.parameters()], lr=0.1)
        self.their_optimizer = torch.optim.SGD([p for piece in self.reference for p in piece.parameters()], lr=0.1)

    def batch(self, number: int, replica: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * number + replica)
        x, y = torch.randn(2, self.case.rows, WIDTH, generator=generator, dtype=torch.float64)
        return x, y

    def step(self, number: int) -> None:
        """One batch through the pipelines, and all replicas' batches through the reference, by microbatches."""
        x, y = self.batch(number, self.replica)
        self.schedule.step(x, target=y, losses=[])
        for replica in range(self.n_replicas):
            x, y = self.batch(number, replica)
            chunks = zip(
                torch.tensor_split(x, self.case.n_microbatches),
                torch.tensor_split(y, self.case.n_microbatches),
                strict=True,
            )
            for chunk, target in chunks:
                output = chunk
                for piece in self.reference:
                    output = piece(output)
                share = len(chunk) / self.case.rows / self.n_replicas
                (functional.mse_loss(output, target) * share).backward()

    def check_gradients(self, what: str) -> None:
        for number, module in self.held:
            named = zip(module.named_parameters(), self.reference[number].parameters(), strict=True)
            for (name, mine), theirs in named:
                a = None if mine.grad is None else whole(mine.grad)
                if self.partial and "shift" in name and a is not None:
                    # Nothing wraps it: it has this replica's own gradient.
                    a = a.clone()
                    dist.all_reduce(a, group=self.mesh["dp"].get_group())
                    a /= self.n_replicas
                worst = transparency.difference(a, theirs.grad)
                if not worst <= transparency.TOLERANCE:
                    self.differences.append(
                        f"rank {self.rank}: gradient of {name}, stage {number}, {what}, differs by {worst:g}"
                    )

    def update(self) -> None:
        if self.partial:  # keep what nothing wraps as it is, on both sides
            for _, module in self.held:
                module.shift.grad = None
            for piece in self.reference:
                piece.shift.grad = None
        for optimizer in (self.optimizer, self.their_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.their_optimizer.zero_grad()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As each wrapper spells it."""
        with no_sync([module for _, module in self.held]):
            yield

    def expected(self, calls: dict[str, int], *, syncs: bool) -> str | None:
        """What is wrong with a step's collectives: one reduction, and one gathering, a wrapped module."""
        n_wrapped = {"fsdp_nested": 3, "ddp_inside": 2, "fsdp_inside": 2}.get(self.case.wrapper, 1) * len(self.held)
        shards = self.case.wrapper.startswith(("fsdp", "hsdp")) and self.case.wrapper != "fsdp_replicate"
        reductions = "_reduce_scatter_base_" if shards else "allreduce_"
        found = calls.get(reductions, 0)
        wanted = n_wrapped if syncs else 0
        if self.case.wrapper in SPARSE and syncs:
            wanted += n_wrapped * (self.case.wrapper == "find_unused" or calls.get("first", 0))  # of the used map
        if found != wanted:
            return f"rank {self.rank}: {found} {reductions} in a step, not {wanted}: {calls}"
        if shards and "fsdp" in self.case.wrapper and calls.get("_allgather_base_", 0) != n_wrapped:
            return f"rank {self.rank}: {calls.get('_allgather_base_', 0)} gatherings in a step, not {n_wrapped}"
        return None


def train(rank: int, size: int, group: Any, case: Case) -> list[str]:
    """Three optimizer steps with evals between; then two steps added up; then one of them without reduction."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("default", ".* are computed in action I, not in W")
        return _train(rank, size, case)


def _train(rank: int, size: int, case: Case) -> list[str]:
    replicas = Replicas(rank, size, case)
    counted = Counted()
    differences = replicas.differences

    def step(number: int, syncs: bool = True) -> None:
        with counted:
            replicas.step(number)
        calls = counted.take()
        static = case.wrapper.startswith("static")
        wrong = replicas.expected({**calls, "first": 1} if number == 0 and static else calls, syncs=syncs)
        if number == 0 and case.wrapper == "static":
            wrong = None  # the first step of a static graph reduces a map of used parameters as well
        if wrong is not None:
            differences.append(wrong)

    for number in range(3):
        step(number)
        replicas.check_gradients(f"step {number}")
        replicas.update()
        replicas.schedule.eval(replicas.batch(9, replicas.replica)[0])
    step(3)
    step(4)
    replicas.check_gradients("two steps added up")
    replicas.zero_grad()
    with replicas.no_sync():
        step(5, syncs=False)
    step(6)
    replicas.check_gradients("a step without reduction, and one with it")
    if case.wrapper.startswith(("fsdp", "hsdp")) and case.wrapper != "fsdp_replicate":
        for _, module in replicas.held:
            unsharded = [name for name, p in module.named_parameters() if not hasattr(p, "full_tensor")]
            if [name for name in unsharded if not replicas.partial or "shift" not in name]:
                differences.append(f"rank {rank}: parameters are not sharded after a step: {unsharded}")
    replicas.schedule.close()
    return differences


def train_many(rank: int, size: int, group: Any, cases: list[Case]) -> list[str]:
    """Several cases in one call."""
    return [f"{case}: {text}" for case in cases for text in train(rank, size, group, case)]
