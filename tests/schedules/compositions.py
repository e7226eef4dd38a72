"""The case behind each row of docs/compositions.md, by the row's name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from compositions_run import RATE, ROWS, WIDTH, Composition, Stage, every, run
from gradients import grad
from models import compiled
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import checkpoint

V_SHAPED_OR_LOOPED = ("ScheduleInterleaved1F1B v=2", "ScheduleZBVZeroBubble")


class Around(nn.Module):
    """A stage whose forward is a function of the module and the input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.linear(x))))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def _with(function: Callable[[Any, Tensor], Any]) -> Callable[[int], list[nn.Module]]:
    return every(lambda: Around(function))


def _prepared(prepare: Callable[[Any], Any]) -> Callable[[int], list[nn.Module]]:
    """Ordinary stages, each prepared."""

    def make() -> nn.Module:
        stage = Stage()
        prepare(stage)
        return stage

    return every(make)


# Checkpointing


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def _selective(self: Around, x: Tensor) -> Tensor:
    return checkpoint.checkpoint(
        self.inner,
        x,
        use_reentrant=False,
        context_fn=lambda: checkpoint.create_selective_checkpoint_contexts(_keep_products),
    )


def _checkpoint_wrapper() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(Stage())


# Precision


def _autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _autocast_in_forward(self: Around, x: Tensor) -> Tensor:
    with _autocast():
        return self.inner(x)


def _float_mse(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target.float())


# Hooks


def _module_hooks(stage: Any) -> None:
    # Factors about 1: larger ones make three steps diverge, and differences in rounding with them.
    stage.linear.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
    stage.linear.register_forward_hook(lambda _, args, output: output * 0.75)
    stage.register_full_backward_pre_hook(lambda _, outputs: tuple(gradient * 0.5 for gradient in outputs))
    stage.linear.register_full_backward_hook(
        lambda _, inputs, outputs: tuple(g if g is None else g * 1.25 for g in inputs)
    )


def _tensor_hooks(self: Around, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 3)
    y = self.inner(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y


def _parameter_hooks(stage: Any) -> None:
    stage.linear.weight.register_hook(lambda gradient: gradient * 2)


def _optimizer_in_backward(stage: Any) -> None:
    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= RATE * grad(parameter)
        parameter.grad = None

    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def _multi_grad_hooks(mode: Any) -> Callable[[Any], None]:
    def prepare(stage: Any) -> None:
        stage.calls = 0

        def count(_: Any) -> None:
            stage.calls += 1

        torch.autograd.graph.register_multi_grad_hook(list(stage.parameters()), count, mode=mode)

    return prepare


def _note_calls(module: Any, notes: dict[str, Tensor], step: int) -> None:
    notes["calls"] = torch.tensor(module.calls)


def _main_grads(count: int) -> list[nn.Module]:
    """Each gradient is moved, as it is made, to a buffer of the optimizer's."""

    def prepare(stage: Any) -> None:
        stage.double()  # to() would give the parameters other nodes
        stage.nodes = []
        for parameter in stage.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
            stage.nodes.append(torch.autograd.graph.get_gradient_edge(parameter).node)

            def move(*_: Any, parameter: Any = parameter) -> None:
                parameter.main_grad += parameter.grad
                parameter.grad = None

            stage.nodes[-1].register_hook(move)

    return _prepared(prepare)(count)


def _descend_main_grads(modules: list[nn.Module], step: int, group: Any) -> None:
    with torch.no_grad():
        for parameter in (p for module in modules for p in module.parameters()):
            main_grad: Any = parameter.main_grad  # type: ignore[attr-defined]
            parameter.sub_(RATE * main_grad)
            main_grad.zero_()


def _apply_in_backward(stage: nn.Module, group: Any) -> nn.Module:
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, stage.parameters(), {"lr": RATE})
    return stage


# Modules


def _composable_checkpoint(stage: nn.Module) -> None:
    from torch.distributed._composable.checkpoint_activation import checkpoint as composable

    composable(stage)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(1))[0].squeeze(1)


class _Lazy(nn.LazyLinear):
    """Starts from the same weights wherever it is first called."""

    def initialize_parameters(self, input: Tensor) -> None:
        with torch.random.fork_rng([]):
            torch.manual_seed(7)
            super().initialize_parameters(input)


def _traced() -> nn.Module:
    return torch.jit.trace(Stage().double(), torch.randn(2, WIDTH, dtype=torch.float64))


def _compiled(count: int) -> list[nn.Module]:
    torch._dynamo.reset()  # else a code object compiled often enough runs as it is
    return [compiled(Stage(), backend="aot_eager", fullgraph=True) for _ in range(count)]


class _Auxiliary(torch.autograd.Function):
    """Passes the output on, and adds an auxiliary loss in its backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.shape = loss.shape
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], gradients[0].new_ones(ctx.shape)


def _injected(self: Around, x: Tensor) -> Tensor:
    hidden = self.linear(x)
    made: Any = _Auxiliary.apply(self.inner(x), 0.1 * hidden.square().mean() * (len(x) / ROWS))
    return made


def _penalized(output: Tensor, target: Tensor) -> Tensor:
    with torch.enable_grad():
        output = output if output.requires_grad else output.detach().requires_grad_()
        loss = functional.mse_loss(output, target)
        (slope,) = torch.autograd.grad(loss, output, create_graph=True)
        return loss + slope.square().sum()


class _Views(nn.Module):
    """Returns tensors that share memory."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), last

    def forward(self, x: Tensor, *views: Tensor) -> Any:
        made = self.linear(x)
        for view in views:
            made = made + view.sum(1, keepdim=True)
        return torch.tanh(made) if self.last else (made, made[:, :2], made.detach(), made)


def _views(count: int) -> list[nn.Module]:
    return [_Views(number == count - 1) for number in range(count)]


def _cumulative_norm() -> nn.Module:
    stage: Any = Stage()
    norm = nn.BatchNorm1d(WIDTH, momentum=None)  # whose average does not depend on the order
    stage.linear = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), norm)
    return stage


class _SyncBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class _Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.inner = [nn.Linear(WIDTH, WIDTH, device="meta")]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.func.functional_call(self.inner[0], {"weight": self.w * 0.5, "bias": self.b}, (x,)))


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(5, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.embedding((x > 0).sum(1)))


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))
        self.b = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x.to(torch.complex128) @ self.w) * self.b


def _complex_mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().square().mean()


def _share(modules: list[nn.Module], pieces: list[list[int]]) -> None:
    for held in pieces:
        for piece in held[1:]:
            modules[piece].linear = modules[held[0]].linear


def _vmap(self: Around, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: torch.tanh(self.linear.weight @ row + self.linear.bias))(x) + self.second(x)


def _energy(self: Around, x: Tensor) -> Tensor:
    return torch.func.grad(lambda value: torch.tanh(self.linear(value)).square().sum())(x) + self.second(x)


# Between steps


def _average(module: nn.Module, notes: dict[str, Tensor], step: int) -> None:
    kept: Any = getattr(_average, "kept", None)
    if kept is None:
        kept = _average.kept = {}  # type: ignore[attr-defined]
    averaged = kept.setdefault(id(notes), AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    averaged.update_parameters(module)
    notes.update({f"average of {name}": value.clone() for name, value in averaged.module.named_parameters()})
    if step == 2:
        del kept[id(notes)]


def _load(assign: bool) -> Callable[[nn.Module, dict[str, Tensor], int], None]:
    def load(module: nn.Module, notes: dict[str, Tensor], step: int) -> None:
        module.load_state_dict({k: v * 0.5 + 0.1 for k, v in module.state_dict().items()}, assign=assign)

    return load


def _replace(module: Any, notes: dict[str, Tensor], step: int) -> None:
    module.linear.weight = nn.Parameter(module.linear.weight.detach() * 0.5)


def _freeze(module: Any, notes: dict[str, Tensor], step: int) -> None:
    module.linear.weight.requires_grad_(step != 0)
    module.linear.bias.requires_grad_(step == 0)


def _fsdp1(module: nn.Module, group: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, process_group=group, device_id=torch.device("cpu"))


@contextlib.contextmanager
def _packed() -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (x.clone() * 2, 0), lambda packed: packed[0] / 2):
        yield


COMPOSITIONS: dict[str, Composition] = {
    "`checkpoint(use_reentrant=False)`": Composition(
        _with(lambda self, x: checkpoint.checkpoint(self.inner, x, use_reentrant=False))
    ),
    "`checkpoint(use_reentrant=True)`": Composition(
        _with(lambda self, x: checkpoint.checkpoint(self.inner, self.linear(x), use_reentrant=True))
    ),
    "selective checkpointing": Composition(_with(_selective)),
    "`checkpoint_wrapper`": Composition(every(_checkpoint_wrapper)),
    "`torch.distributed._composable.checkpoint`": Composition(_prepared(_composable_checkpoint)),
    "`torch.compile`": Composition(_compiled),
    "`torch.jit.script`": Composition(every(lambda: torch.jit.script(Stage()))),
    "`torch.jit.trace`": Composition(every(_traced)),
    "`autocast` around `step()`": Composition(
        _with(Around.inner), around=_autocast, whole=False, loss=_float_mse, dtype=torch.float32, tolerance=1e-5
    ),
    "`autocast` in a forward": Composition(
        _with(_autocast_in_forward), whole=False, loss=_float_mse, dtype=torch.float32, tolerance=1e-5
    ),
    "forward and backward hooks of modules": Composition(_prepared(_module_hooks)),
    "hooks of tensors": Composition(_with(_tensor_hooks)),
    "hooks of parameters": Composition(_prepared(_parameter_hooks)),
    "post-accumulate-grad hooks, an optimizer in the backward": Composition(_prepared(_optimizer_in_backward)),
    "multi-grad hooks": Composition(_prepared(_multi_grad_hooks("all")), whole=False, after=_note_calls),
    'multi-grad hooks, `mode="any"`': Composition(_prepared(_multi_grad_hooks("any")), whole=False, after=_note_calls),
    "hooks of AccumulateGrad nodes (`main_grad`)": Composition(_main_grads, update=_descend_main_grads),
    "`_apply_optimizer_in_backward`": Composition(
        wrap=_apply_in_backward, refused="use Tensor.register_post_accumulate_grad_hook"
    ),
    "`parametrizations.weight_norm`": Composition(_prepared(lambda s: parametrizations.weight_norm(s.linear))),
    "`parametrizations.spectral_norm`": Composition(
        _prepared(lambda s: parametrizations.spectral_norm(s.linear)), whole=False
    ),
    "`parametrizations.orthogonal`": Composition(_prepared(lambda s: parametrizations.orthogonal(s.linear))),
    "`parametrize.cached()` around `step()`": Composition(
        _prepared(lambda s: parametrizations.weight_norm(s.linear)),
        around=parametrize.cached,
        refused="parametrize.cached() around step()",
    ),
    "`nn.utils.prune`": Composition(_prepared(lambda s: prune.l1_unstructured(s.linear, "weight", 0.3))),
    "recurrent modules (`LSTM`)": Composition(every(_Recurrent)),
    "lazy modules": Composition(every(lambda: nn.Sequential(_Lazy(WIDTH), nn.Tanh()))),
    "`BatchNorm`": Composition(
        # (no bias before it: that has no influence, and its gradient would be rounding noise)
        every(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh())),
        whole=False,
    ),
    "`BatchNorm` in two stages of a rank": Composition(
        every(_cumulative_norm), tie=_share, whole=False, schedules=V_SHAPED_OR_LOOPED
    ),
    "an auxiliary loss that a forward injects": Composition(_with(_injected)),
    "`torch.autograd.grad` of the output in `loss_fn`": Composition(loss=_penalized, whole=False),
    "outputs of a stage that share memory": Composition(_views),
    "`SyncBatchNorm` over ranks of the pipeline": Composition(
        every(_SyncBatchNorm), refused="SyncBatchNorm would add up the statistics of different stages"
    ),
    "dropout": Composition(every(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))), whole=False),
    "`functional_call`": Composition(every(_Functional)),
    "`AveragedModel` (EMA, SWA)": Composition(after=_average),
    "`load_state_dict()` between steps": Composition(after=_load(False)),
    "`load_state_dict(assign=True)` between steps": Composition(after=_load(True)),
    "parameters replaced between steps": Composition(after=_replace),
    "parameters frozen and unfrozen between steps": Composition(after=_freeze),
    "a module in two stages of a rank": Composition(tie=_share, schedules=V_SHAPED_OR_LOOPED),
    "`torch.func.vmap` in a forward": Composition(_with(_vmap)),
    "`torch.func.grad` in a forward": Composition(_with(_energy)),
    "`Embedding(sparse=True)`": Composition(every(_Sparse)),
    "complex parameters": Composition(every(_Complex), loss=_complex_mse),
    "`saved_tensors_hooks`": Composition(around=_packed),
    "`save_on_cpu`": Composition(around=torch.autograd.graph.save_on_cpu),
    "`detect_anomaly`": Composition(around=torch.autograd.detect_anomaly),
    "`allow_mutation_on_saved_tensors`": Composition(
        around=torch.autograd.graph.allow_mutation_on_saved_tensors, refused="clone() a tensor before you change it"
    ),
    "`eval()` in `inference_mode()`": Composition(around_eval=torch.inference_mode),
    "`nn.DataParallel`": Composition(every(lambda: nn.DataParallel(Stage()))),
    "`FullyShardedDataParallel` (FSDP1)": Composition(wrap=_fsdp1, refused="use fully_shard"),
}


def run_all(rank: int, size: int, group: Any, schedule: str) -> dict[str, list[str]]:
    """What is wrong in a schedule, by row."""
    return run(rank, size, group, schedule, COMPOSITIONS)
