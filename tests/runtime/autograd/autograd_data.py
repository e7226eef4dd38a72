"""Unusual batches, losses and models: one case each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from autograd_base import WIDTH, Batch, Case, Join, Special, join_trees, joins, mse, plain_batch
from autograd_special import SPECIALS, checkpointed
from torch import Tensor, nn
from torch.nn import functional

import pypipe


class Named(nn.Module):
    """A stage with keyword arguments of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, *, scale: Any = None, shift: Any = None, flag: bool = False, deep: Any = None
    ) -> Tensor:
        y = self.linear(x)
        if scale is not None:
            y = y * scale
        if shift is not None:
            y = y + shift
        if deep is not None:
            y = y + deep["a"][0] * deep["b"]
        return -y if flag else torch.tanh(y)


class KeywordOnly(nn.Module):
    """A first stage whose batch comes by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.linear(x if y is None else x * y)


class Tokens(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, sparse=sparse)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class ArgMax(nn.Module):
    """Returns integers only: nothing upstream gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).argmax(1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y, torch.sin(y), (x > 0).double(), x.detach() * 3


class InPlaceTwo(nn.Module):
    """Saves one of its inputs for backward and changes the others in place."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(WIDTH))

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
        kept = a * self.p + d * self.p
        b.mul_(2).relu_()
        c.add_(1)
        return kept + b, c


class Swap(nn.Module):
    """Returns what it got, in another order, and one of it twice."""

    def forward(self, *xs: Tensor) -> Any:
        return (*reversed(xs), xs[0])


class Frozen(Join):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Plain(nn.Module):
    """Holds a leaf that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> Any:
        return x, self.extra.view(1, WIDTH)


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def _x_leaf(size: int) -> Case:
    return Case(joins(size), batch=lambda step: plain_batch(args=(_leaf(7, WIDTH),)))


def _x_with_a_graph(size: int) -> Case:
    def batch(step: int) -> Batch:
        leaf = _leaf(7, WIDTH)
        return plain_batch(args=(torch.tanh(leaf * 2) * leaf,), leaves={0: [leaf]})

    return Case(joins(size), batch=batch, whole=True)


def _x_with_a_graph_in_place(size: int) -> Case:
    def batch(step: int) -> Batch:
        leaf = _leaf(7, WIDTH)
        return plain_batch(args=(leaf * 2,), leaves={0: [leaf]})

    return Case([Special(SPECIALS["relu in place"]), *joins(size - 1)], batch=batch, whole=True)


def _x_twice(size: int) -> Case:
    def batch(step: int) -> Batch:
        leaf = _leaf(7, WIDTH)
        x = leaf * 2
        return plain_batch(args=(x, x), kwargs={0: {"again": x}}, leaves={0: [leaf]})

    return Case(joins(size), batch=batch, whole=True)


def _x_is_target(size: int) -> Case:
    def batch(step: int) -> Batch:
        x = torch.randn(7, WIDTH, dtype=torch.float64)
        return Batch((x,), x)

    return Case(joins(size), batch=batch)


def _keyword_gradients(size: int) -> Case:
    def batch(step: int) -> Batch:
        return plain_batch(
            kwargs={
                stage: {"scale": _leaf(7, WIDTH), "shift": _leaf(7, 1), "flag": stage == 1} for stage in range(size)
            }
        )

    return Case([Named() for _ in range(size)], batch=batch)


def _replicated_keyword_gradients(size: int) -> Case:
    specs = {"shift": pypipe.Replicate(), "scale": pypipe.Replicate()}

    def batch(step: int) -> Batch:
        return plain_batch(kwargs={stage: {"shift": _leaf(1, WIDTH), "scale": _leaf(1)} for stage in range(size)})

    return Case([Named() for _ in range(size)], batch=batch, schedule_kwargs={"kwargs_chunk_spec": specs})


def _nested_keywords(size: int) -> Case:
    def batch(step: int) -> Batch:
        return plain_batch(
            kwargs={
                stage: {
                    "deep": {"a": [_leaf(7, WIDTH), "text"], "b": torch.randn(7, 1, dtype=torch.float64), "c": None}
                }
                for stage in range(size)
            }
        )

    return Case([Named() for _ in range(size)], batch=batch)


def _keywords_of_one_stage(size: int) -> Case:
    def batch(step: int) -> Batch:
        return plain_batch(kwargs={size - 1: {"shift": torch.randn(7, WIDTH, dtype=torch.float64), "flag": True}})

    return Case([Named() for _ in range(size)], batch=batch)


def _keywords_only(size: int) -> Case:
    def batch(step: int) -> Batch:
        return plain_batch(args=(), kwargs={0: {"x": _leaf(7, WIDTH), "y": torch.randn(7, WIDTH, dtype=torch.float64)}})

    return Case([KeywordOnly(), *joins(size - 1)], batch=batch)


def _chunked_along_another_dimension(size: int) -> Case:
    class Transposes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.linear(x.t()) + table

    def batch(step: int) -> Batch:
        return plain_batch(args=(_leaf(WIDTH, 7), _leaf(WIDTH)))

    specs = (pypipe.TensorChunkSpec(1), pypipe.Replicate())
    return Case([Transposes(), *joins(size - 1)], batch=batch, schedule_kwargs={"args_chunk_spec": specs})


def _target_gradients(size: int) -> Case:
    def batch(step: int) -> Batch:
        leaf = _leaf(7, WIDTH)
        return plain_batch(target=leaf * 2 if step else leaf, leaves={size - 1: [leaf]})

    return Case(joins(size), batch=batch, whole=True)


def _nested_target(size: int) -> Case:
    def batch(step: int) -> Batch:
        return plain_batch(target={"y": torch.randn(7, WIDTH, dtype=torch.float64), "more": [_leaf(7, 1)]})

    return Case(joins(size), batch=batch)


def _flat_target(size: int) -> Case:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output.flatten(), target)

    return Case(
        joins(size), batch=lambda step: plain_batch(target=torch.randn(7 * WIDTH, dtype=torch.float64)), loss=loss
    )


def _tokens(sparse: bool) -> Callable[[int], Case]:
    def make(size: int) -> Case:
        return Case(
            [Tokens(sparse), *joins(size - 1)],
            batch=lambda step: plain_batch(args=(torch.randint(9, (7,)),)),
        )

    return make


def _sparse_in_the_middle(size: int) -> Case:
    modules = [ArgMax(), Tokens(True), *joins(size - 2)]
    return Case(modules[:size])


def _integers_only(size: int) -> Case:
    return Case([ArgMax(), Tokens(), *joins(size - 2)])


def _frozen(*stages: int) -> Callable[[int], Case]:
    def make(size: int) -> Case:
        return Case([Frozen() if stage in stages else Join() for stage in range(size)])

    return make


def _frozen_with_x_gradient(size: int) -> Case:
    return Case([Frozen() for _ in range(size)], batch=lambda step: plain_batch(args=(_leaf(7, WIDTH),)))


def _autocast(size: int) -> Case:
    modules = [Special(SPECIALS["one module twice"]) for _ in range(size)]

    def batch(step: int) -> Batch:
        return Batch((torch.randn(7, WIDTH),), torch.randn(7, WIDTH))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    # With two microbatches sums have one order, so everything is equal to the bit.
    return Case(
        [module.float() for module in modules], batch=batch, loss=loss, n_microbatches=2, tolerance=0.0, double=False,
        around=lambda: torch.autocast("cpu", torch.bfloat16),
    )  # fmt: skip


def _autocast_checkpoint(size: int) -> Case:
    case = _autocast(size)
    case.modules = [Special(checkpointed(stage == 1)).float() for stage in range(size)]
    return case


def _autocast_with_a_graph_behind(size: int) -> Case:
    case = _autocast(size)

    def batch(step: int) -> Batch:
        leaf = torch.randn(7, WIDTH).requires_grad_()
        weight = torch.randn(WIDTH, WIDTH).requires_grad_()
        return Batch((leaf @ weight,), torch.randn(7, WIDTH), leaves={0: [leaf, weight]})

    case.batch = batch
    case.steps = 1
    case.tolerance = 1e-5  # the graph behind x is walked once, not once for each microbatch
    return case


def _bfloat16(size: int) -> Case:
    def batch(step: int) -> Batch:
        return Batch((torch.randn(6, WIDTH).bfloat16(),), torch.randn(6, WIDTH).bfloat16(), rows=6)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).bfloat16() for _ in range(size)]
    return Case(modules, batch=batch, loss=loss, n_microbatches=2, steps=1, tolerance=0.0, double=False)


def _clip(size: int) -> Case:
    def after(module: nn.Module, step: int) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        nn.utils.clip_grad_value_(module.parameters(), 0.005)

    return Case(joins(size), after=after)


def _train(size: int) -> Case:
    optimizers: dict[int, Any] = {}

    def after(module: nn.Module, step: int) -> None:
        if id(module) not in optimizers:
            optimizers[id(module)] = (module, torch.optim.SGD(module.parameters(), 0.1, momentum=0.9))
        optimizers[id(module)][1].step()
        optimizers[id(module)][1].zero_grad(set_to_none=step % 2 == 0)

    return Case(joins(size), after=after, steps=4)


def _scaled_loss(size: int) -> Case:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss(output: Any, target: Tensor) -> Tensor:
        return scaler.scale(mse(output, target))

    return Case(joins(size), loss=loss)


def _loss_kwargs(size: int) -> Case:
    def loss(output: Any, target: Tensor, *, power: int, weights: Tensor) -> Tensor:
        return ((output - target).abs() ** power * weights).mean()

    kwargs = {"power": 3, "weights": torch.arange(4.0, dtype=torch.float64)}
    return Case(joins(size), loss=loss, loss_kwargs=kwargs)


def _loss_of_shape_one(size: int) -> Case:
    return Case(joins(size), loss=lambda output, target: mse(output, target).view(1))


def _loss_with_a_parameter(size: int) -> Case:
    """The loss adds a parameter as it is: autograd may make the very tensor that backward starts from its gradient."""
    modules = [*joins(size - 1), Special(lambda self, x: (x @ self.w, self.s.unsqueeze(0).unsqueeze(0)))]

    def loss(output: Any, target: Tensor) -> Tensor:
        return mse(output[0], target) + output[1].squeeze()

    return Case(modules, loss=loss, steps=3, join=join_trees)


def _loss_is_an_input(size: int) -> Case:
    """The last stage gets a loss and returns it."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).square().mean()

    class Identity(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    modules: list[nn.Module] = [*joins(size - 2), Loss(), Identity()]
    return Case(modules, loss=lambda output, target: output, join=torch.stack)


def _uneven_weights(size: int) -> Case:
    return Case(joins(size), n_microbatches=4, batch=lambda step: plain_batch([7, 9, 4][step]), steps=3, whole=True)


def _sums(size: int) -> Case:
    def loss(output: Any, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target, reduction="sum")

    return Case(joins(size), loss=loss, scale_grads=False, whole=True)


def _merge_spec(size: int) -> Case:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            return {"t": y.t(), "n": len(x), "sum": y.sum()}

    spec = {"t": pypipe.TensorChunkSpec(1), "n": pypipe.Reduce(0, lambda a, b: a + b), "sum": None}

    def join(outputs: list[Any]) -> Any:
        return {
            "t": torch.cat([output["t"] for output in outputs], 1),
            "n": sum(output["n"] for output in outputs),
            "sum": torch.stack([output["sum"] for output in outputs]),
        }

    return Case(
        [*joins(size - 1), Last()], loss=lambda output, target: mse(output["t"].t(), target), join=join,
        schedule_kwargs={"output_merge_spec": spec},
    )  # fmt: skip


def _batch_norm_in_eval(size: int) -> Case:
    modules = [Special(SPECIALS["batch norm"]).eval() for _ in range(size)]
    return Case(modules)


def _leaf_that_is_no_parameter(size: int) -> Case:
    return Case([Plain(), *joins(size - 1)])


def _in_place_beside_saved(size: int) -> Case:
    return Case([Two(), InPlaceTwo(), *joins(size - 2)])


def _swaps(size: int) -> Case:
    return Case([Two(), *[Swap() for _ in range(size - 1)]], join=join_trees)


def _shapes_change(size: int) -> Case:
    return Case(joins(size), batch=lambda step: plain_batch([7, 3, 8, 5][step]), steps=4)


CASES: dict[str, Callable[[int], Case]] = {
    "plain": lambda size: Case(joins(size), whole=True),
    "one microbatch": lambda size: Case(joins(size), n_microbatches=1),
    "as many microbatches as rows": lambda size: Case(joins(size), n_microbatches=7),
    "uneven microbatches, each weighted by its rows": _uneven_weights,
    "plain sums": _sums,
    "other batch sizes": _shapes_change,
    "x is a leaf": _x_leaf,
    "x has a graph behind it": _x_with_a_graph,
    "x has a graph behind it and is changed in place": _x_with_a_graph_in_place,
    "x is given twice": _x_twice,
    "x is the target": _x_is_target,
    "keywords that need gradients": _keyword_gradients,
    "keywords for all microbatches that need gradients": _replicated_keyword_gradients,
    "nested keywords": _nested_keywords,
    "keywords of one stage": _keywords_of_one_stage,
    "keywords only": _keywords_only,
    "arguments cut along another dimension": _chunked_along_another_dimension,
    "a target that needs a gradient": _target_gradients,
    "a nested target": _nested_target,
    "a flattened target": _flat_target,
    "tokens": _tokens(False),
    "a sparse embedding": _tokens(True),
    "a sparse embedding in the middle": _sparse_in_the_middle,
    "a stage that returns integers only": _integers_only,
    "first stage frozen": _frozen(0),
    "first stages frozen": _frozen(0, 1),
    "last stage frozen": _frozen(2),
    "last stages frozen": _frozen(1, 2),
    "middle stage frozen": _frozen(1),
    "all frozen but x": _frozen_with_x_gradient,
    "autocast": _autocast,
    "autocast with checkpoints": _autocast_checkpoint,
    "autocast with a graph behind x": _autocast_with_a_graph_behind,
    "bfloat16 throughout": _bfloat16,
    "clipped gradients": _clip,
    "an optimizer": _train,
    "a scaled loss": _scaled_loss,
    "loss_kwargs": _loss_kwargs,
    "a loss of shape (1,)": _loss_of_shape_one,
    "a loss with a parameter in it": _loss_with_a_parameter,
    "a loss that comes from the stage before": _loss_is_an_input,
    "output_merge_spec": _merge_spec,
    "batch norm in eval mode": _batch_norm_in_eval,
    "a leaf that is no parameter": _leaf_that_is_no_parameter,
    "inputs changed in place beside one that is saved": _in_place_beside_saved,
    "stages that only pass on": _swaps,
}
