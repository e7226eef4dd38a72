"""Loss functions that run their own backward, and what is refused, against the unpipelined model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transparency
from models import make, twins, unpipelined
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[Any, Tensor], Tensor]


def _in_pieces(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A mean squared error, backed up row by row; the total, and the output's gradient."""
    cut = output.detach().requires_grad_()
    total = torch.zeros((), dtype=output.dtype)
    for row, wanted in zip(cut.split(1), target.split(1), strict=True):
        part = functional.mse_loss(row, wanted, reduction="sum") / target.numel()
        part.backward()
        total += part.detach()
    assert cut.grad is not None
    return total, cut.grad


def _backs_up(output: Tensor, target: Tensor) -> Tensor:
    total, gradient = _in_pieces(output, target)
    output.backward(gradient)
    return total


def _backs_up_in_parts(output: Tensor, target: Tensor) -> Tensor:
    total, gradient = _in_pieces(output, target)
    output.backward(gradient / 4, retain_graph=True)
    output.backward(gradient * 0.75)
    return total


def _leaves(output: Tensor, target: Tensor) -> Tensor:
    total, output.grad = _in_pieces(output, target)
    return total


def _retains(output: Tensor, target: Tensor) -> Tensor:
    output.retain_grad()
    return _backs_up(output, target)


def _hands_over(output: Tensor, target: Tensor) -> Tensor:
    total, gradient = _in_pieces(output, target)
    through = (output * gradient).sum()
    return total + through - through.detach()


def _looks(output: Tensor, target: Tensor) -> Tensor:
    torch.autograd.grad((output * target).sum(), output)
    return functional.mse_loss(output, target)


def _retains_and_looks(output: Tensor, target: Tensor) -> Tensor:
    output.retain_grad()
    return _looks(output, target)


def _notes(output: Tensor, target: Tensor) -> Tensor:
    (output.grad,) = torch.autograd.grad((output * target).sum(), output)
    return functional.mse_loss(output, target)


def _penalizes(output: Tensor, target: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad((torch.tanh(output) * target).sum(), output, create_graph=True)
    return functional.mse_loss(output, target) + slope.pow(2).mean()


def _regularizes(output: Tensor, target: Tensor) -> Tensor:
    loss = functional.mse_loss(output, target)
    (slope,) = torch.autograd.grad(loss, output, create_graph=True)
    return loss + 0.1 * slope.pow(2).sum()


def _looks_and_backs_up(output: Tensor, target: Tensor) -> Tensor:
    loss = functional.mse_loss(output, target)
    (gradient,) = torch.autograd.grad(loss, output)
    output.backward(gradient)
    return loss.detach()


def _notes_and_backs_up(output: Tensor, target: Tensor) -> Tensor:
    loss = functional.mse_loss(output, target)
    (gradient,) = torch.autograd.grad(loss, output)
    output.grad = gradient * 3
    output.backward(gradient)
    return loss.detach()


def _half_by_itself(output: Tensor, target: Tensor) -> Tensor:
    (functional.mse_loss(output, target) / 2).backward(retain_graph=True)
    return functional.mse_loss(output, target) / 2


def _in_place(output: Tensor, target: Tensor) -> Tensor:
    output -= target
    return (output * output).mean()


OWN: dict[str, Loss] = {
    "backs up into the output": _backs_up,
    "backs up in parts": _backs_up_in_parts,
    "leaves a gradient on the output": _leaves,
    "retains the output's gradient": _retains,
}
OTHERS: dict[str, Loss] = {
    "hands its gradient to autograd": _hands_over,
}


# As they are without a pipeline, gradients of the output that they ask for and all.
ORDINARY: dict[str, Loss] = {
    "looks at a gradient": _looks,
    "retains the output's gradient and looks at one": _retains_and_looks,
    "notes a gradient on the output": _notes,
    "penalizes a gradient": _penalizes,
    "regularizes its own gradient": _regularizes,
    "looks at its gradient and backs it up": _looks_and_backs_up,
    "notes a gradient and backs up another": _notes_and_backs_up,
    "backs up a half by itself": _half_by_itself,
}


def _off(rank: int, held: list[tuple[int, nn.Module]], reference: list[nn.Module]) -> list[str]:
    """Which gradients are not the reference's."""
    differences = []
    for piece, module in held:
        for (parameter, a), b in zip(module.named_parameters(), reference[piece].parameters(), strict=True):
            worst = transparency.difference(a.grad, b.grad)
            if not worst <= transparency.TOLERANCE:
                differences.append(f"rank {rank}: {parameter} of stage {piece} is {worst:g} off")
    return differences


def compare(rank: int, size: int, group: Any, name: str, scale_grads: bool) -> list[str]:
    """Two steps with each loss function, gradients added up."""
    differences: list[str] = []
    for what, loss in {**OWN, **OTHERS}.items():
        modules, make_batch, _ = make("mlp", transparency.count_stages(name, size))
        reference = twins(modules)
        schedule, held = transparency.build(
            rank, size, group, name, modules, 3, loss_fn=loss, timeout=30, scale_grads=scale_grads
        )
        for step in range(2):
            x, y = make_batch(7)
            losses: list[Tensor] = []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                schedule.step(x, target=y, losses=losses)
            told = [str(w.message) for w in caught if "runs its own backward" in str(w.message)]
            has_last = any(piece == len(modules) - 1 for piece, _ in held)
            if len(told) != (has_last and what in OWN and scale_grads and step == 0):
                differences.append(f"{what}, rank {rank}, step {step}: was told {told}")
            chunks = list(zip(torch.tensor_split(x, 3), torch.tensor_split(y, 3), strict=True))
            for chunk, wanted in chunks:
                expected = functional.mse_loss(unpipelined(reference, chunk), wanted)
                (expected * (len(chunk) / len(x) if scale_grads else 1.0)).backward()
                if has_last:
                    worst = transparency.difference(losses.pop(0), expected.detach())
                    if not worst <= transparency.TOLERANCE:
                        differences.append(f"{what}, rank {rank}, step {step}: a loss is {worst:g} off")
        differences += [f"{what}, {text}" for text in _off(rank, held, reference)]
        schedule.close()
    return differences


class _Headed(nn.Module):
    """The last stage, with a head that its loss calls, a chunk at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4).double(), nn.Linear(4, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


def with_a_head(rank: int, size: int, group: Any, name: str, hands_over: bool) -> list[str]:
    """What the loss's own backward adds to the stage's head is weighted too; over two steps."""
    torch.manual_seed(0)
    count = transparency.count_stages(name, size)
    last = _Headed()
    modules: list[nn.Module] = [*(nn.Linear(4, 4).double() for _ in range(count - 1)), last]
    reference: Any = twins(modules)

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        cut = hidden.detach().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for part, wanted in zip(cut.split(1), target.split(1), strict=True):
            piece = functional.cross_entropy(last.head(part), wanted, reduction="sum") / len(target)
            piece.backward()
            total += piece.detach()
        if not hands_over:
            hidden.backward(cut.grad)
            return total
        assert cut.grad is not None
        through = (hidden * cut.grad).sum()
        return total + through - through.detach()

    schedule, held = transparency.build(rank, size, group, name, modules, 3, loss_fn=loss, timeout=30)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2):
            x, target = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 5, (7,))
            schedule.step(x, target=target)
            functional.cross_entropy(reference[-1].head(unpipelined(reference, x)), target).backward()
    differences = _off(rank, held, reference)
    schedule.close()
    return differences


class _Two(nn.Module):
    """Returns a tree, with a tensor that is there twice and one that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.a(x))
        return {"y": y, "pair": (self.b(x), y), "count": torch.arange(len(x))}


def _of_a_tree(output: Any, target: Tensor) -> Tensor:
    y, (z, again) = output["y"], output["pair"]
    assert y is again
    a, b = y.detach().requires_grad_(), z.detach().requires_grad_()
    loss = functional.mse_loss(a * b, target)
    loss.backward()
    torch.autograd.backward([y, z], [a.grad, b.grad])
    return loss.detach()


def of_a_tree(rank: int, size: int, group: Any, name: str) -> list[str]:
    """The output of the last stage is a dict of tensors."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [*(nn.Linear(4, 4).double() for _ in range(size - 1)), _Two()]
    reference = twins(modules)
    x, y = torch.randn(2, 6, 4, dtype=torch.float64)
    schedule, held = transparency.build(rank, size, group, name, modules, 3, loss_fn=_of_a_tree, timeout=30)
    schedule.step(x, target=y, return_outputs=False)
    output = unpipelined(reference, x)
    functional.mse_loss(output["y"] * output["pair"][0], y).backward()
    differences = _off(rank, held, reference)
    schedule.close()
    return differences


def in_place(rank: int, size: int, group: Any, name: str, saves: bool) -> list[str]:
    """A loss that changes its input in place: right, or autograd's version error where the stage has saved that."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(4, 4).double() for _ in range(size)]
    if saves:
        modules[-1] = nn.Sequential(modules[-1], nn.Tanh())
    reference = twins(modules)
    x, y = torch.randn(2, 6, 4, dtype=torch.float64)
    schedule, held = transparency.build(rank, size, group, name, modules, 3, loss_fn=_in_place, timeout=30)
    try:
        schedule.step(x, target=y, return_outputs=False)
    except Exception as error:
        return [str(error)]
    finally:
        schedule.close()
    _in_place(unpipelined(reference, x), y).backward()
    return _off(rank, held, reference)


REFUSED: dict[str, Loss] = {
    "detached": lambda output, target: functional.mse_loss(output.detach(), target),
    "backs up, and returns no scalar": lambda output, target: (_backs_up(output, target), output.detach())[1],
    "backs up, and returns a number": lambda output, target: float(_backs_up(output, target)),  # type: ignore[dict-item, return-value]
}


def refused(rank: int, size: int, group: Any, name: str) -> list[str]:
    """A loss that is refused has added nothing to any `.grad`."""
    wrong: list[str] = []
    for what, loss in REFUSED.items():
        modules, make_batch, _ = make("mlp", transparency.count_stages(name, size))
        schedule, held = transparency.build(rank, size, group, name, modules, 3, loss_fn=loss, timeout=30)
        x, y = make_batch(6)
        try:
            schedule.step(x, target=y)
            wrong.append(f"{what}: nothing was raised")
        except Exception as error:
            if "loss" not in str(error):
                wrong.append(f"{what}: {error}")
        finally:
            schedule.close()
        if rank == size - 1:
            added = [n for _, module in held for n, p in module.named_parameters() if p.grad is not None]
            wrong += [f"{what}: {n} has a gradient" for n in added]
    return wrong


def _add_unpipelined(reference: list[nn.Module], loss: Loss, x: Tensor, y: Tensor, n_microbatches: int) -> None:
    """Adds what the loss gives for each microbatch, called as without a pipeline, weighted by the microbatch's rows."""
    parameters = [parameter for module in reference for parameter in module.parameters()]
    before = [parameter.grad for parameter in parameters]
    for chunk, wanted in zip(x.tensor_split(n_microbatches), y.tensor_split(n_microbatches), strict=True):
        for parameter in parameters:
            parameter.grad = None
        value = loss(unpipelined(reference, chunk), wanted)
        if value.requires_grad:
            value.backward()
        for i, parameter in enumerate(parameters):
            if parameter.grad is not None:
                part = parameter.grad * (len(chunk) / len(x))
                earlier = before[i]
                before[i] = part if earlier is None else earlier + part
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient


def like_unpipelined(rank: int, size: int, group: Any, name: str) -> list[str]:
    """Losses that look at gradients of the output, or assign it one; three steps, gradients added up."""
    differences: list[str] = []
    for what, loss in ORDINARY.items():
        modules, make_batch, _ = make("mlp", transparency.count_stages(name, size))
        reference = twins(modules)
        schedule, held = transparency.build(rank, size, group, name, modules, 3, loss_fn=loss, timeout=30)
        for _ in range(3):
            x, y = make_batch(7)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                schedule.step(x, target=y)
                _add_unpipelined(reference, loss, x, y, 3)
        differences += [f"{what}, {text}" for text in _off(rank, held, reference)]
        schedule.close()
    return differences


class _From:
    """A loss that is another one from its n-th call on."""

    def __init__(self, first: int, then: Loss) -> None:
        self._calls, self._first, self._then = 0, first, then

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self._calls += 1
        return functional.mse_loss(output, target) if self._calls <= self._first else self._then(output, target)


def from_the_last_microbatch_on(rank: int, size: int, group: Any, name: str) -> list[str]:
    """A loss begins to run its own backward in the last microbatch of the first step."""
    differences: list[str] = []
    for what, then in {"a half": _half_by_itself, "all": _backs_up}.items():
        modules, make_batch, _ = make("mlp", transparency.count_stages(name, size))
        reference = twins(modules)
        loss, plain = _From(2, then), _From(2, then)
        schedule, held = transparency.build(rank, size, group, name, modules, 3, loss_fn=loss, timeout=30)
        for _ in range(2):
            x, y = make_batch(7)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                schedule.step(x, target=y)
            _add_unpipelined(reference, plain, x, y, 3)
        differences += [f"{what}, {text}" for text in _off(rank, held, reference)]
        schedule.close()
    return differences


def later(rank: int, size: int, group: Any, name: str, what: str) -> list[str]:
    """A loss begins to run its own backward in the second step; the error's message."""
    torch.manual_seed(0)
    count = transparency.count_stages(name, size)
    last = _Headed()
    modules: list[nn.Module] = [*(nn.Linear(4, 4).double() for _ in range(count - 1)), last]

    def probe(output: Tensor, target: Tensor) -> Tensor:
        functional.mse_loss(last.head(output.detach())[:, :4], target).backward()
        return functional.mse_loss(output, target)

    kinds: dict[str, Loss] = {"half": _half_by_itself, "all": _backs_up, "assigned": _leaves, "probe": probe}
    loss = _From(3, kinds[what])
    schedule, _ = transparency.build(rank, size, group, name, modules, 3, loss_fn=loss, timeout=30)
    x, y = torch.randn(2, 6, 4, dtype=torch.float64)
    schedule.step(x, target=y)
    try:
        schedule.step(x, target=y)
    except Exception as error:
        return [str(error)]
    finally:
        schedule.close()
    return ["nothing was raised"]


def of_parameters(rank: int, size: int, group: Any, name: str) -> list[str]:
    """A loss asks for the gradients of the last stage's parameters; the error's message and notes."""
    modules, make_batch, _ = make("mlp", transparency.count_stages(name, size))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = functional.mse_loss(output, target)
        torch.autograd.grad(value, next(modules[-1].parameters()), retain_graph=True)
        return value

    schedule, _ = transparency.build(rank, size, group, name, modules, 3, loss_fn=loss, timeout=30)
    x, y = make_batch(6)
    try:
        schedule.step(x, target=y)
    except Exception as error:
        return ["\n".join([str(error), *getattr(error, "__notes__", [])])]
    finally:
        schedule.close()
    return ["nothing was raised"]
