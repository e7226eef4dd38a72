"""Ways in which a pipeline is built or called wrongly, and what every rank then sees."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import bad_input_built  # noqa: F401, its cases enter CASES
import bad_input_called  # noqa: F401, as these do
import torch
import transparency
from bad_input_setup import (
    CASES,
    TIMEOUT,
    Returns,
    Setup,
    make_setup,
)
from torch import Tensor
from torch.nn import functional

import pypipe


@dataclasses.dataclass
class Seen:
    """What one rank saw of a case."""

    kind: str = ""  # the exception's class; "" where nothing was raised
    public: bool = False  # whether it is a PipelineError
    text: str = ""  # its message and its notes
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)  # of a RemoteStageError
    built: bool = False
    again: Seen | None = None  # of a second step() on the same schedule
    trained: list[str] = dataclasses.field(default_factory=list)  # what is wrong with a new schedule afterwards

    def note(self, error: BaseException) -> None:
        self.kind = type(error).__name__
        self.public = isinstance(error, pypipe.PipelineError)
        with contextlib.suppress(ValueError):
            self.text = str(error)
        self.text = "\n".join([self.text, *getattr(error, "__notes__", [])])
        if isinstance(error, pypipe.RemoteStageError):
            self.origin = {
                key: getattr(error, key) for key in ("rank", "stage", "action", "microbatch", "remote_traceback")
            }


def build(setup: Setup, group: Any) -> Any:
    """The schedule of one rank."""
    stage_options = {"device": torch.device("cpu"), "group": group, **setup.stage_options}
    stage = pypipe.PipelineStage(setup.module, setup.index, setup.stages, **stage_options)
    options = {"timeout": TIMEOUT, **setup.options}
    return getattr(pypipe, setup.schedule)(stage, setup.microbatches, setup.loss, **options)


def attempt(rank: int, size: int, group: Any, case: str) -> Seen:
    """Builds and calls a pipeline as the case says; then again; then a good one."""
    setup = make_setup(rank, size)
    CASES[case](setup)
    seen = Seen()
    schedule: Any = None

    def step() -> None:
        with setup.around():
            schedule.step(*setup.args, target=setup.target, losses=setup.losses, **setup.kwargs)

    try:
        schedule = build(setup, group)
        seen.built = True
        step()
        for _ in range(50 * setup.late):  # without a backward, ranks run ahead as far as there are slots
            step()
    except BaseException as error:
        seen.note(error)
    if schedule is not None:
        seen.again = Seen()
        try:
            step()
        except BaseException as error:
            seen.again.note(error)
        schedule.close()
        schedule.close()
    seen.trained = transparency.compare(rank, size, group, "Schedule1F1B", "mlp", 2, 5, True)
    return seen


def merge_fails_at_the_end(rank: int, size: int, group: Any) -> Seen:
    """The last rank cannot merge its outputs, when the others may have finished their step."""

    def uneven(output: Tensor) -> Any:
        uneven.count += 1  # type: ignore[attr-defined]
        return (output,) if uneven.count == 1 else (output, output)  # type: ignore[attr-defined]

    uneven.count = 0  # type: ignore[attr-defined]
    setup = make_setup(rank, size)
    setup.loss = lambda output, target: functional.mse_loss(output[0], target)
    if setup.last:
        setup.module = Returns(uneven)
    schedule = build(setup, group)
    seen = Seen()
    for _ in range(2):
        try:
            schedule.step(*setup.args, target=setup.target)
        except pypipe.PipelineError as error:
            seen.note(error)
            break
    schedule.close()
    seen.trained = transparency.compare(rank, size, group, "Schedule1F1B", "mlp", 2, 5, True)
    return seen


def leave_early(rank: int, size: int, group: Any, leaver: int, wait: bool) -> Seen:
    """One rank steps once and closes; the others step again. `wait`: until all have stepped once."""
    import torch.distributed as dist

    setup = make_setup(rank, size)
    schedule = build(setup, group)
    seen = Seen()
    schedule.step(*setup.args, target=setup.target)
    if wait:
        dist.barrier(group=group)
    try:
        if rank != leaver:
            schedule.step(*setup.args, target=setup.target)
    except BaseException as error:
        seen.note(error)
        seen.again = Seen()
        try:
            schedule.step(*setup.args, target=setup.target)
        except BaseException as second:
            seen.again.note(second)
    schedule.close()
    seen.trained = transparency.compare(rank, size, group, "Schedule1F1B", "mlp", 2, 5, True)
    return seen


def close_at_start(rank: int, size: int, group: Any, leaver: int) -> Seen:
    """One rank closes a schedule that it has never used, or leaves out the only step()."""
    setup = make_setup(rank, size)
    setup.options["timeout"] = 1.0
    schedule = build(setup, group)
    seen = Seen()
    if rank == leaver:
        schedule.close()
    try:
        schedule.step(*setup.args, target=setup.target)
    except BaseException as error:
        seen.note(error)
    schedule.close()
    return seen


def step_inside_itself(rank: int, size: int, group: Any) -> Seen:
    """A module calls step() of the very schedule that runs it."""
    setup = make_setup(rank, size)
    schedule: Any = None
    if rank == 0:

        def again(output: Tensor) -> Tensor:
            schedule.step(*setup.args, target=setup.target)
            return output

        setup.module = Returns(again)
    schedule = build(setup, group)
    seen = Seen()
    try:
        schedule.step(*setup.args, target=setup.target)
    except BaseException as error:
        seen.note(error)
    schedule.close()
    seen.trained = transparency.compare(rank, size, group, "Schedule1F1B", "mlp", 2, 5, True)
    return seen


def interrupt_while_waiting(rank: int, size: int, group: Any, folder: str) -> Seen:
    """Rank 1 is busy in its module until rank 0, which waits for it, has been interrupted by a signal."""
    import signal
    import threading

    pid_file = os.path.join(folder, "pid")
    setup = make_setup(rank, size)
    done = threading.Event()

    def busy(output: Tensor) -> Tensor:
        # Rank 0 has sent its output, so all that it does from now on is wait for a gradient.
        os.kill(int(Path(pid_file).read_text()), signal.SIGINT)
        deadline = 0
        while not os.path.exists(pid_file + ".out") and deadline < 1000:
            done.wait(0.01)
            deadline += 1
        return output

    if rank == 0:
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(str(os.getpid()))
        os.replace(file.name, pid_file)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        setup.module = Returns(busy)
    setup.microbatches = 1
    seen = Seen()
    try:
        schedule = build(setup, group)
        schedule.step(*setup.args, target=setup.target)
    except BaseException as error:
        seen.note(error)
    if rank == 0:
        signal.signal(signal.SIGINT, before)
        Path(pid_file + ".out").touch()
    schedule.close()
    seen.trained = transparency.compare(rank, size, group, "Schedule1F1B", "mlp", 2, 5, True)
    return seen
