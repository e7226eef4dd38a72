"""The module of one stage: the model with holes, and a forward() that runs the model's own up to the cut."""

from __future__ import annotations

import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pypipe.errors import ConfigurationError
from pypipe.splitting.inputs import packed, positional_names, unpacked
from pypipe.splitting.plan import EVERYWHERE, Plan, Value
from pypipe.splitting.shapes import Shapes, blank
from pypipe.splitting.stand_ins import Interception, Run, Stop, intercepting

__all__ = ["make_stage_module"]


def make_stage_module(
    model: nn.Module, plan: Plan, stage: int, output: Callable[[Any], Any] | None, device: torch.device
) -> nn.Module:
    """The model as one stage has it.

    Modules that the stage runs are the model's own. The others, and those with a cut in them, are copies of the
    object without its weights; the whole has the model's class, its attributes and its names.
    """
    run = Run()
    made = _Copies(model, plan, stage, run, device).of(model)
    made.__dict__["forward"] = _StageForward(made, model, plan, stage, run, output, device)
    return made


class _Copies:
    """Makes each module's copy once."""

    def __init__(self, model: nn.Module, plan: Plan, stage: int, run: Run, device: torch.device) -> None:
        self._plan = plan
        self._stage = stage
        self._run = run
        self._device = device
        self._made: dict[int, nn.Module] = {}
        self._held = {
            id(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if stage in plan.held[plan.first_names[name]]
        }

    def of(self, module: nn.Module) -> nn.Module:
        """The module itself, where the stage runs it as it is; else a copy."""
        made = self._made.get(id(module))
        if made is None:
            roles = self._plan.roles.get(id(module))
            made = self._copy(module) if roles is None else self._of_called(module, roles)
        return made

    def _of_called(self, module: nn.Module, roles: Any) -> nn.Module:
        plan, stage = self._plan, self._stage
        name = plan.names[id(module)]
        sent: dict[int, list[tuple[int, Value, bool]]] = {}
        for value in plan.sent(stage):
            if value.name == name and roles[value.call] == stage:
                sent.setdefault(value.call, []).append((value.leaf, value, value in plan.rewritten))
        is_own = stage in roles or EVERYWHERE in roles
        if not sent and set(roles) <= {stage, EVERYWHERE}:
            self._made[id(module)] = module
            return module
        received: dict[int, dict[int, Value]] = {}
        for value in plan.received[stage]:
            if value.name == name:
                received.setdefault(value.call, {})[value.leaf] = value
        own_class: Any = type(module)
        kind = intercepting(own_class)
        if is_own:
            made: nn.Module = object.__new__(kind)
            made.__dict__.update(module.__dict__)  # with the very dicts of its parts
            self._made[id(module)] = made
        else:
            made = self._copy(module, kind)
        shapes = Shapes(module, self._device)
        rewritten = frozenset(value.leaf for value in plan.rewritten if value.name == name)
        made.__dict__["_interception"] = Interception(self._run, stage, name, roles, received, sent, shapes, rewritten)
        return made

    def _copy(self, module: nn.Module, kind: type | None = None) -> nn.Module:
        made: nn.Module = object.__new__(kind or type(module))
        self._made[id(module)] = made
        attributes = dict(module.__dict__)
        parameters: dict[str, Any] = {}
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in self._held:
                parameters[name] = parameter
            else:
                attributes[name] = blank(parameter, self._device)
        attributes["_parameters"] = parameters
        attributes["_buffers"] = dict(module._buffers) if kind is None else {}
        if kind is not None:
            for name, buffer in module._buffers.items():
                attributes[name] = None if buffer is None else blank(buffer, self._device)
        for name, value in module.__dict__.items():
            if name.endswith("_hooks") and isinstance(value, dict):
                attributes[name] = OrderedDict() if kind is not None else type(value)(value)
        children = {name: None if child is None else self.of(child) for name, child in module._modules.items()}
        attributes["_modules"] = children
        skipped = {"_parameters", "_buffers", "_modules"}
        made.__dict__.update(
            {name: value if name in skipped else self._rebound(value) for name, value in attributes.items()}
        )
        return made

    def _rebound(self, value: Any, depth: int = 0) -> Any:
        """An attribute's value, with copies of the modules in the place of modules."""
        if isinstance(value, nn.Module):
            return self.of(value) if id(value) in self._plan.names else value
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self._rebound(value.__self__))
        if depth > 3:
            return value
        if type(value) is functools.partial:
            parts = [self._rebound(part, depth + 1) for part in (value.func, value.args, value.keywords)]
            if parts[0] is not value.func or parts[1] is not value.args or parts[2] is not value.keywords:
                return functools.partial(parts[0], *parts[1], **parts[2])
        elif type(value) in (list, tuple):
            items = [self._rebound(item, depth + 1) for item in value]
            if any(a is not b for a, b in zip(items, value, strict=True)):
                return type(value)(items)
        elif type(value) is dict:
            items = [self._rebound(item, depth + 1) for item in value.values()]
            if any(a is not b for a, b in zip(items, value.values(), strict=True)):
                return dict(zip(value, items, strict=True))
        return value


class _StageForward:
    """A stage's forward(): the model's own, from the model's inputs on, up to the cut."""

    def __init__(
        self,
        module: nn.Module,
        model: nn.Module,
        plan: Plan,
        stage: int,
        run: Run,
        output: Callable[[Any], Any] | None,
        device: torch.device,
    ) -> None:
        self._module = module
        self._kind = type(model)
        self._own = module.__dict__.get("forward")
        self._plan = plan
        self._stage = stage
        self._run = run
        self._output = output
        self._device = device
        self._names = positional_names(model)
        self._looked_at_stop = False
        self.__name__ = "forward"
        try:
            self.__signature__ = inspect.signature(model.forward)
        except (TypeError, ValueError):
            self.__signature__ = inspect.signature(self.__call__)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, plan, stage = self._run, self._plan, self._stage
        received: dict[Value, Any] = {}
        if stage > 0:
            digest, *packet = args
            if digest != plan.digest:
                raise ConfigurationError(
                    f"stage {stage}: the stage before was cut in another way: call split() with the same model, cuts, "
                    "placement and example on every rank"
                )
            values, args, kwargs = unpacked(self._names, packet, kwargs, stage, self._device)
            received = dict(zip(plan.received[stage], values, strict=True))
        run.begin(received, self._device.type)
        try:
            result = (
                self._own(*args, **kwargs)
                if self._own is not None
                else self._kind.forward(self._module, *args, **kwargs)
            )
            if stage < plan.num_stages - 1:
                raise ConfigurationError(
                    f"stage {stage}: the model's forward() ended before it came to the next stage's first module, as "
                    "it did with the example: give split() an example like the batches"
                )
        except Stop as stop:
            if not self._looked_at_stop:
                self._look_at(stop)
            values = [self._to_send(value) for value in plan.sent(stage)]
            return (plan.digest, values, *packed(self._names, plan, args, kwargs))
        finally:
            run.end()
        return result if self._output is None else self._output(result)

    def _to_send(self, value: Value) -> Any:
        run = self._run
        found = run.taken.get(value)
        if found is None:
            found = run.received.get(value)
        if found is None and value not in self._plan.optional:
            raise ConfigurationError(
                f"stage {self._stage}: {value} is to be sent, but was not computed, as it was with the example: give "
                "split() an example like the batches"
            )
        return found

    def _look_at(self, stop: Stop) -> None:
        """Raises where the cut is within a checkpointed block."""
        self._looked_at_stop = True
        trace = stop.__traceback__
        is_within = False
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            is_within = is_within or file.endswith("torch/utils/checkpoint.py")
            if is_within and file.endswith("torch/nn/modules/module.py"):  # not the next stage's module itself
                raise ConfigurationError(
                    f"stage {self._stage} ends within a checkpointed block, which the backward could not run again: "
                    "cut before the block"
                )
            trace = trace.tb_next
