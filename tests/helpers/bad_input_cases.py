"""Ways in which a pipeline is built or called wrongly, and what every rank then sees."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transparency
from models import Block
from torch import Tensor, nn
from torch.nn import functional

import pypipe

TIMEOUT = 20.0  # seconds; nothing here may wait for as long as that


@dataclasses.dataclass
class Setup:
    """What one rank builds its pipeline with, and calls it with. A case changes it on some ranks."""

    rank: int
    size: int
    index: int
    stages: int
    module: nn.Module
    args: tuple[Any, ...]
    target: Any
    microbatches: Any = 2
    loss: Any = functional.mse_loss
    schedule: str = "Schedule1F1B"
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    losses: Any = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the schedule
    stage_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    around: Callable[[], Any] = contextlib.nullcontext  # while step() runs
    late: bool = False  # whether other ranks may have ended their step by then, so that they hear of it at the next

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1


def _setup(rank: int, size: int) -> Setup:
    torch.manual_seed(7)
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    return Setup(rank, size, rank, size, Block(6).double(), (x,), y)


class Returns(nn.Module):
    """Puts `value(output)` in the place of its output."""

    def __init__(self, value: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.block = Block(6).double()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value(self.block(x))


class Raises(nn.Module):
    """Raises at its n-th forward, or in the backward that belongs to it."""

    def __init__(self, error: BaseException, at: int, backward: bool = False) -> None:
        super().__init__()
        self.block = Block(6).double()
        self.error, self.at, self.backward, self.count = error, at, backward, 0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x)
        if self.count == self.at:
            if not self.backward:
                raise self.error
            output.register_hook(self._hook)
        self.count += 1
        return output

    def _hook(self, gradient: Tensor) -> None:
        raise self.error


class Mutters(RuntimeError):
    """An exception that cannot say what is wrong."""

    def __str__(self) -> str:
        raise ValueError("no words")


class WithFactor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6).double()

    def forward(self, x: Tensor, *more: Tensor, factor: Tensor) -> Tensor:
        return self.block(x) * factor


def _open_file(output: Tensor) -> Any:
    return output, open(os.devnull)


def _raise(error: BaseException) -> Any:
    raise error


# Each case changes the setup of the ranks that it is about.
CASES: dict[str, Callable[[Setup], None]] = {}


def _case(function: Callable[[Setup], None]) -> Callable[[Setup], None]:
    CASES[function.__name__] = function
    return function


@_case
def no_microbatches_anywhere(s: Setup) -> None:
    s.microbatches = 0


@_case
def no_microbatches_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.microbatches = 0


@_case
def half_a_microbatch_on_rank_0(s: Setup) -> None:
    if s.rank == 0:
        s.microbatches = 2.5


@_case
def no_time_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.options["timeout"] = 0


@_case
def loss_that_cannot_be_called_on_rank_2(s: Setup) -> None:
    if s.rank == 2:
        s.loss = "mse"


@_case
def stage_index_out_of_range_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.index = s.stages


@_case
def stage_index_out_of_range_everywhere(s: Setup) -> None:
    s.index += s.stages


@_case
def negative_stage_index_on_rank_2(s: Setup) -> None:
    if s.rank == 2:
        s.index = -1


@_case
def stage_index_given_twice(s: Setup) -> None:
    if s.rank == 2:
        s.index = 1


@_case
def stages_on_the_wrong_ranks(s: Setup) -> None:
    s.index = s.size - 1 - s.rank


@_case
def no_module_on_rank_0(s: Setup) -> None:
    if s.rank == 0:
        s.module = torch.tanh  # type: ignore[assignment]


@_case
def unknown_device_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.stage_options["device"] = "abacus"


@_case
def unknown_link_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.around = lambda: environment(PYPIPE_LINK="string and two cans")


@_case
def num_stages_that_disagree(s: Setup) -> None:
    if s.rank == 0:
        s.stages += 1


@_case
def more_stages_than_ranks(s: Setup) -> None:
    s.stages += 1


@_case
def fewer_stages_than_ranks(s: Setup) -> None:
    s.stages, s.index = 1, 0


@_case
def another_schedule_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.schedule = "ScheduleGPipe"


@_case
def another_number_of_microbatches_on_rank_2(s: Setup) -> None:
    if s.rank == 2:
        s.microbatches = 4


@_case
def loss_only_on_the_last_rank(s: Setup) -> None:
    if not s.last:
        s.loss = None


@_case
def another_scale_grads_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.options["scale_grads"] = False


@_case
def batch_smaller_than_m(s: Setup) -> None:
    s.microbatches = 5


@_case
def empty_batch(s: Setup) -> None:
    s.args, s.target = (s.args[0][:0],), s.target[:0]


@_case
def arguments_of_differing_lengths(s: Setup) -> None:
    s.args = (s.args[0], s.args[0][:3])


@_case
def kwargs_of_another_length_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.module, s.kwargs = WithFactor(), {"factor": torch.ones(3, 1, dtype=torch.float64)}


@_case
def kwargs_of_another_length_on_rank_0(s: Setup) -> None:
    if s.rank == 0:
        s.module, s.kwargs = WithFactor(), {"factor": torch.ones(3, 1, dtype=torch.float64)}


@_case
def target_of_another_length(s: Setup) -> None:
    if s.last:
        s.target = s.target[:3]


@_case
def target_missing(s: Setup) -> None:
    if s.last:
        s.target = None


@_case
def loss_that_is_no_scalar(s: Setup) -> None:
    s.loss = lambda output, target: (output - target).square().mean(1)


@_case
def loss_that_is_no_tensor(s: Setup) -> None:
    s.loss = lambda output, target: float(functional.mse_loss(output, target))


@_case
def loss_that_depends_on_nothing(s: Setup) -> None:
    s.loss = lambda output, target: functional.mse_loss(output.detach(), target)


@_case
def output_with_an_open_file(s: Setup) -> None:
    if s.rank == 0:
        s.module = Returns(_open_file)


@_case
def output_with_a_set_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.module = Returns(lambda output: {"x": output, "names": {"a"}})


@_case
def output_that_is_sparse(s: Setup) -> None:
    if s.rank == 0:
        s.module = Returns(lambda output: output.detach().to_sparse())


@_case
def output_on_another_device(s: Setup) -> None:
    if s.rank == 1:
        s.module = Returns(lambda output: output.to("meta"))


@_case
def output_in_a_cycle(s: Setup) -> None:
    def endless(output: Tensor) -> Any:
        tree: list[Any] = [output]
        tree.append(tree)
        return tree

    if s.rank == 0:
        s.module = Returns(endless)


@_case
def step_under_no_grad_everywhere(s: Setup) -> None:
    s.around = torch.no_grad


@_case
def step_under_no_grad_on_rank_1(s: Setup) -> None:
    if s.rank == 1:
        s.around = torch.no_grad


@_case
def losses_that_are_no_list(s: Setup) -> None:
    if s.last:
        s.losses = ()


@_case
def losses_without_a_loss_function(s: Setup) -> None:
    s.loss, s.late = None, True
    if s.last:
        s.losses = []


@_case
def args_chunk_spec_with_a_dimension_too_many(s: Setup) -> None:
    s.options["args_chunk_spec"] = (pypipe.TensorChunkSpec(2),)


@_case
def args_chunk_spec_for_two_arguments(s: Setup) -> None:
    s.options["args_chunk_spec"] = (pypipe.TensorChunkSpec(0), pypipe.TensorChunkSpec(0))


@_case
def args_chunk_spec_that_is_none(s: Setup) -> None:
    s.options["args_chunk_spec"] = ("rows",)


@_case
def kwargs_chunk_spec_for_an_unknown_name(s: Setup) -> None:
    if s.rank == 1:
        s.module = WithFactor()
        s.kwargs = {"factor": torch.ones(4, 1, dtype=torch.float64)}
        s.options["kwargs_chunk_spec"] = {"fctr": pypipe.TensorChunkSpec(0)}


@_case
def module_that_raises_in_forward(s: Setup) -> None:
    if s.rank == 1:
        s.module = Raises(ZeroDivisionError("out of luck"), at=1)


@_case
def first_module_that_raises_in_forward(s: Setup) -> None:
    if s.rank == 0:
        s.module = Raises(ZeroDivisionError("out of luck"), at=0)


@_case
def module_that_raises_in_backward(s: Setup) -> None:
    s.late = True
    if s.rank == 1:
        s.module = Raises(ZeroDivisionError("out of luck"), at=1, backward=True)


@_case
def last_module_that_raises_in_backward(s: Setup) -> None:
    if s.last:
        s.module = Raises(ZeroDivisionError("out of luck"), at=0, backward=True)


@_case
def loss_that_raises(s: Setup) -> None:
    s.loss = lambda output, target: _raise(ZeroDivisionError("out of luck"))


@_case
def keyboard_interrupt_in_a_module(s: Setup) -> None:
    if s.rank == 1:
        s.module = Raises(KeyboardInterrupt(), at=1)


@_case
def exit_in_a_module(s: Setup) -> None:
    if s.rank == 1:
        s.module = Raises(SystemExit(3), at=0)


@_case
def error_with_a_long_text_in_another_alphabet(s: Setup) -> None:
    if s.rank == 1:
        s.module = Raises(ZeroDivisionError("\u8d85\u51fa\u8303\u56f4" * 10_000), at=1)


@_case
def error_that_cannot_be_printed(s: Setup) -> None:
    if s.rank == 1:
        s.module = Raises(Mutters(), at=1)


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


@contextlib.contextmanager
def environment(**variables: str) -> Any:
    """Sets environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def build(setup: Setup, group: Any) -> Any:
    """The schedule of one rank."""
    stage_options = {"device": torch.device("cpu"), "group": group, **setup.stage_options}
    stage = pypipe.PipelineStage(setup.module, setup.index, setup.stages, **stage_options)
    options = {"timeout": TIMEOUT, **setup.options}
    return getattr(pypipe, setup.schedule)(stage, setup.microbatches, setup.loss, **options)


def attempt(rank: int, size: int, group: Any, case: str) -> Seen:
    """Builds and calls a pipeline as the case says; then again; then a good one."""
    setup = _setup(rank, size)
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
    setup = _setup(rank, size)
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

    setup = _setup(rank, size)
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
    setup = _setup(rank, size)
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
    setup = _setup(rank, size)
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
    setup = _setup(rank, size)
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
