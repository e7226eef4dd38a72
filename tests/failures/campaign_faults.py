"""What befalls a rank in the fault campaign."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from campaign_cases import WIDTH, Case
from torch import Tensor, nn

from pypipe import _core
from pypipe.runtime.transport import connection

TIMEOUT = 20.0


class Vanished(BaseException):
    """The rank is gone, as far as the others can see."""


_sockets: list[int] = []  # of the hub that was made last
_deaf: list[socket.socket] = []  # what took their places
_add_peer: Callable[..., None] = _core.Hub.add_peer


def _noting(hub: Any, rank: int, descriptor: int) -> None:
    _sockets.append(descriptor)
    _add_peer(hub, rank, descriptor)


@contextlib.contextmanager
def linked(link: str) -> Iterator[None]:
    """For a while, schedules that connect go over this link, and their sockets are noted."""
    before = os.environ.get("PYPIPE_LINK")
    os.environ["PYPIPE_LINK"] = link
    _core.Hub.add_peer = _noting  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        _core.Hub.add_peer = _add_peer  # type: ignore[method-assign]
        if before is None:
            del os.environ["PYPIPE_LINK"]
        else:
            os.environ["PYPIPE_LINK"] = before


@contextlib.contextmanager
def no_hurry() -> Iterator[None]:
    """Schedules that connect meanwhile may take their time for it, whatever their timeout; they start as busy."""
    meet, recorder = connection.meet, connection._recorder  # type: ignore[attr-defined]

    def meet_slowly(*arguments: Any) -> Any:
        return meet(*arguments[:-1], TIMEOUT)  # type: ignore[call-arg]

    def busy_recorder(*arguments: Any) -> Any:
        made = recorder(*arguments)
        made.core.set_busy("getting ready")
        return made

    with patch.multiple(connection, meet=meet_slowly, _recorder=busy_recorder):
        yield


def forget_sockets() -> None:
    """The next hub's sockets are the ones that count."""
    _sockets.clear()
    for end in _deaf:
        end.close()
    _deaf.clear()


def make(case: Case, schedule: Any, stage: Any, action: Any) -> Callable[[], None]:
    """The fault, to be called before the action of the culprit's."""
    hub = schedule._pipeline._running.connection.hub
    match case.fault:
        case "raise":
            return functools.partial(_raise, f"fault {case.seed}")
        case "module":
            return functools.partial(_raise_once, stage._module, f"fault {case.seed}")
        case "hook" | "loss":
            return functools.partial(alarmed.append, f"fault {case.seed}")
        case "vanish":
            return _vanish
        case "kill":
            return functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        case "stop":
            return functools.partial(os.kill, os.getpid(), signal.SIGSTOP)
        case "late":
            return functools.partial(_be_late, stage._module, lambda: hub.cause() is not None)
        case "nan":
            return functools.partial(_spoil, stage._module)
        case "corrupt":
            channel = stage._receive_forward if action.kind.label == "F" else stage._receive_backward
            return functools.partial(_flip_next, channel, random.Random(case.seed))
    return lambda: None


def _raise(text: str) -> None:
    raise ValueError(text)


def _raise_once(module: nn.Module, text: str) -> None:
    """The module's next forward raises."""

    def hook(*_: Any) -> None:
        handle.remove()
        raise ValueError(text)

    handle = module.register_forward_pre_hook(hook)


alarmed: list[str] = []
"""While it holds something, alarm() raises that, once."""


def alarm(*_: Any) -> None:
    """What hooks and loss functions call."""
    if alarmed:
        raise ValueError(alarmed.pop())


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The campaign's loss."""
    alarm()
    return nn.functional.mse_loss(output, target)


def with_hook(module: nn.Module) -> nn.Module:
    """Backward through the module calls alarm()."""

    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(alarm)

    module.register_forward_hook(hook)
    return module


def _vanish() -> None:
    """What a SIGKILL does to the sockets; the process lives on, so that the next case can have it.

    This rank's own hub must not see that the others hang up: a dead rank tells nobody of it. So it gets sockets that
    nobody writes to in the places of its own, before these end.
    """
    own = [socket.socket(fileno=os.dup(descriptor)) for descriptor in _sockets]
    for descriptor in _sockets:
        silent, other = socket.socketpair()
        os.dup2(silent.fileno(), descriptor, inheritable=False)
        silent.close()
        _deaf.append(other)
    for end in own:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
    raise Vanished


def _spoil(module: nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))


def _be_late(module: nn.Module, ready: Callable[[], bool]) -> None:
    """The module's next forward takes until the others have had enough."""
    deadline = time.monotonic() + TIMEOUT

    def wait(*_: Any) -> None:
        hook.remove()
        while not ready() and time.monotonic() < deadline:
            threading.Event().wait(0.01)

    hook = module.register_forward_pre_hook(wait)


def _flip_next(channel: Any, source: random.Random) -> None:
    """Flips one bit of the next message that arrives."""
    wait = channel.wait

    def flipping(tag: Any) -> Any:
        message = wait(tag)
        position, bit = source.randrange(WIDTH * 8), 1 << source.randrange(8)
        if hasattr(message, "buffer"):
            message.buffer[position] ^= bit
        else:
            memory = memoryview(message).cast("B")
            memory[position] ^= bit
        del channel.wait  # the method shows again
        return message

    channel.wait = flipping


class Word:
    """What the culprit says of itself before its fault, for those that outlive it or wake it up."""

    def __init__(self, case: Case) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"campaign/{case.link}/{case.seed}"
        self._others = case.n_ranks - 1

    def give(self, at: str) -> None:
        """By the culprit."""
        self._store.set(self._key, f"{at} {os.getpid()}")

    def take(self) -> str:
        """The action, by the others."""
        return str(self._store.get(self._key).decode()).split()[0]

    def wake_up(self) -> None:
        """By each of the others when it has had enough; the last one lets the culprit go on."""
        if self._store.add(f"{self._key}/enough", 1) == self._others:
            os.kill(int(self._store.get(self._key).decode().split()[1]), signal.SIGCONT)
