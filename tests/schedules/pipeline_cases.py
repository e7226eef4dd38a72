"""Several pipelines in one job, and what they leave behind. Run as a script: ranks from torchrun's environment."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transparency
from gradients import grad
from models import make, twins, unpipelined
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import pypipe

CPU = torch.device("cpu")
TIMEOUT = 30.0


class Trainee:
    """A model trained twice, through a pipeline and without one, batch by batch."""

    def __init__(
        self, name: str, rank: int, size: int, group: Any, schedule: str, n_microbatches: int, seed: int
    ) -> None:
        modules, self.make_batch, self.loss_fn = make(name, size, seed)
        self.rank, self.size, self.seed = rank, size, seed
        self.reference = twins(modules)
        self.module = modules[rank]
        self.stage = pypipe.PipelineStage(self.module, rank, size, CPU, group=group)
        self.schedule = getattr(pypipe, schedule)(
            self.stage, n_microbatches=n_microbatches, loss_fn=self.loss_fn, timeout=TIMEOUT
        )
        self.generator = 1000 * seed
        self.differences: list[str] = []

    def batch(self, rows: int = 6) -> tuple[Any, Any]:
        """The next batch, the same on every rank."""
        self.generator += 1
        with torch.random.fork_rng([]):
            torch.manual_seed(self.generator)
            return self.make_batch(rows)

    def check(self, what: str, a: Tensor | None, b: Tensor | None) -> None:
        worst = transparency.difference(a, b)
        if not worst <= transparency.TOLERANCE:
            self.differences.append(f"rank {self.rank}, model {self.seed}: {what} differs by {worst:g}")

    def step(self, rows: int = 6) -> None:
        """Gradients of one more batch, on both sides."""
        x, y = self.batch(rows)
        output = self.schedule.step(x, target=y)
        expected = unpipelined(self.reference, x)
        self.loss_fn(expected, y).backward()
        if self.rank == self.size - 1:
            self.check("output", output, expected.detach())

    def eval(self, rows: int = 6) -> None:
        x, _ = self.batch(rows)
        output = self.schedule.eval(x)
        if self.rank == self.size - 1:
            with torch.no_grad():
                self.check("eval output", output, unpipelined(self.reference, x))

    def update(self) -> None:
        """Compares gradients, and takes an optimizer step."""
        self.check_gradients()
        for module in (self.module, *self.reference):
            optimizer = transparency.optimizer([module])
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        self.check_state()

    def check_gradients(self, factor: float = 1.0) -> None:
        pairs = zip(self.module.named_parameters(), self.reference[self.rank].parameters(), strict=True)
        for (name, a), b in pairs:
            self.check(f"gradient of {name}", a.grad, None if b.grad is None else b.grad * factor)

    def check_state(self) -> None:
        for (name, a), b in zip(
            self.module.state_dict().items(), self.reference[self.rank].state_dict().values(), strict=True
        ):
            self.check(name, a, b)


def replicas(rank: int, size: int, group: Any, schedule: str) -> list[str]:
    """Two replicas of a pipeline of two; each trains half of the batch, gradients are averaged between them."""
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = divmod(rank, 2)
    trainee = Trainee("gpt", place, 2, pipelines[replica], schedule, 2, seed=5)
    for _ in range(3):
        x, y = trainee.batch(8)
        half = slice(4 * replica, 4 * replica + 4)
        output = trainee.schedule.step(x[half], target=y[half])
        for parameter in trainee.module.parameters():
            dist.all_reduce(grad(parameter), group=across[place])
            grad(parameter).div_(2)
        expected = unpipelined(trainee.reference, x)
        trainee.loss_fn(expected, y).backward()
        if place == 1:
            trainee.check("output", output, expected.detach()[half])
        trainee.update()
    trainee.schedule.close()
    return trainee.differences


def in_turn(rank: int, size: int, group: Any) -> list[str]:
    """Two models, two schedules, in turn; steps and evals mixed."""
    a = Trainee("mlp", rank, size, group, "Schedule1F1B", 3, seed=1)
    b = Trainee("mixed", rank, size, group, "ScheduleGPipe", 2, seed=2)
    a.step()
    b.eval()
    a.step(7)
    b.step()
    a.update()
    b.step(5)
    a.eval(4)
    b.update()
    c = Trainee("gpt", rank, size, group, "Schedule1F1B", 4, seed=3)  # a third one, while the others live
    for trainee in (c, a, b, c):
        trainee.step(9)
        trainee.update()
    a.schedule.close()
    for trainee in (b, c):
        trainee.step()
        trainee.update()
    for trainee in (b, c):
        trainee.schedule.close()
    return a.differences + b.differences + c.differences


class Pausing(nn.Module):
    """Calls something at its n-th forward."""

    def __init__(self, module: nn.Module, at: int, call: Callable[[], None]) -> None:
        super().__init__()
        self.module, self.at, self.call, self.count = module, at, call, 0

    def forward(self, *args: Any) -> Any:
        if self.count == self.at:
            self.call()
        self.count += 1
        return self.module(*args)


def one_inside_another(rank: int, size: int, group: Any) -> list[str]:
    """Ranks step() a second pipeline in the middle of a forward of the first.

    Rank 0 does it in its forward of microbatch 1, when it has sent microbatch 0; rank 1 in that of microbatch 0.
    """
    inner = Trainee("gpt", rank, size, group, "Schedule1F1B", 3, seed=11)
    outer = Trainee("mlp", rank, size, group, "Schedule1F1B", 2, seed=12)

    def pause() -> None:
        inner.step()
        inner.eval()
        inner.update()

    outer.schedule.close()
    outer.stage = pypipe.PipelineStage(Pausing(outer.module, 1 - rank, pause), rank, size, CPU, group=group)
    outer.schedule = pypipe.Schedule1F1B(outer.stage, 2, outer.loss_fn, timeout=TIMEOUT)
    for _ in range(2):
        outer.step()
    outer.update()
    inner.step()
    inner.update()
    inner.schedule.close()
    outer.step()
    outer.update()
    outer.schedule.close()
    return inner.differences + outer.differences


def teacher_inside_the_loss(rank: int, size: int, group: Any) -> list[str]:
    """The last rank's loss function asks a second model, a pipeline of one stage, at every microbatch."""
    alone = [dist.new_group([r]) for r in range(4)][rank]
    trainee = Trainee("mlp", rank, size, group, "Schedule1F1B", 3, seed=21)
    teacher = Trainee("mlp", 0, 1, alone, "ScheduleGPipe", 2, seed=22)
    student_loss = trainee.loss_fn

    def loss(output: Tensor, target: Tensor) -> Tensor:
        known = teacher.schedule.eval(target)
        assert torch.is_grad_enabled()
        teacher.check("teacher", known, unpipelined(teacher.reference, target).detach())
        return student_loss(output, target + known)

    trainee.loss_fn = lambda output, target: student_loss(
        output, target + unpipelined(teacher.reference, target).detach()
    )
    trainee.schedule = pypipe.Schedule1F1B(trainee.stage, 3, loss, timeout=TIMEOUT)
    for _ in range(2):
        trainee.step(6)
        trainee.update()
    trainee.schedule.close()
    teacher.schedule.close()
    return trainee.differences + teacher.differences


def one_stage_twice(rank: int, size: int, group: Any) -> list[str]:
    """Two schedules on one stage: gradients of both add up."""
    trainee = Trainee("mixed", rank, size, group, "Schedule1F1B", 2, seed=31)
    schedules = [trainee.schedule, pypipe.ScheduleGPipe(trainee.stage, 5, trainee.loss_fn, timeout=TIMEOUT)]
    for number in (0, 1, 1, 0):
        trainee.schedule = schedules[number]
        trainee.step(5)
    trainee.update()
    for schedule in schedules:
        schedule.close()
    return trainee.differences


def two_groups_of_the_same_ranks(rank: int, size: int, group: Any) -> list[str]:
    """Pipelines over two process groups with the same members."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([2, 3])]
    mine = groups[:2] if rank < 2 else groups[2:]
    trainees = [Trainee("mlp", rank % 2, 2, mine[i], "Schedule1F1B", 2, seed=41 + i) for i in range(2)]
    for number in (0, 1, 0, 1, 1, 0):
        trainees[number].step()
    for trainee in trainees:
        trainee.update()
    trainees[0].schedule.close()
    trainees[1].step()
    trainees[1].update()
    trainees[1].schedule.close()
    return trainees[0].differences + trainees[1].differences


def some_and_all_ranks(rank: int, size: int, group: Any) -> list[str]:
    """A pipeline over ranks 0, 1, 3 of the job, beside one over all four."""
    order = dist.new_group([0, 1, 3])
    everyone = Trainee("mlp", rank, 4, group, "ScheduleGPipe", 2, seed=51)
    some = None
    if rank != 2:
        some = Trainee("gpt", dist.get_rank(order), 3, order, "Schedule1F1B", 4, seed=52)
    for _ in range(2):
        everyone.step()
        if some is not None:
            some.step()
    found = []
    for trainee in (everyone, some):
        if trainee is not None:
            trainee.update()
            trainee.schedule.close()
            found += trainee.differences
    return found


class Belongings:
    """What this process holds that a pipeline might leave behind."""

    def __init__(self) -> None:
        gc.collect()
        self.descriptors = sorted(_descriptors())
        self.threads = sorted(_threads())
        self.python_threads = sorted(thread.name for thread in threading.enumerate())
        self.shared = sorted(os.listdir("/dev/shm"))
        with open("/proc/self/maps") as maps:
            self.mapped = sum("memfd:pypipe" in line for line in maps)
        inodes = {link for _, link in _descriptors()}
        with open("/proc/net/unix") as table:
            self.sockets = sorted(
                line.split()[-1] for line in table if "pypipe-" in line and f"socket:[{line.split()[6]}]" in inodes
            )

    def differences(self, before: Belongings) -> list[str]:
        found = []
        for name, now in vars(self).items():
            if name != "shared" and now != getattr(before, name):
                found.append(f"{name}: {getattr(before, name)} became {now}")
        new = [name for name in self.shared if name not in before.shared and "pypipe" in name]
        return found + [f"/dev/shm/{name}" for name in new]


def _descriptors() -> set[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if not link.startswith("/proc/"):
                found.add((int(name), link))
    return found


def _threads() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            name = file.read().strip()
            if "pypipe" in name:
                names.append(name)
    return names


def leave_nothing(rank: int, size: int, group: Any, how: str, fail: bool) -> list[str]:
    """Trains, leaves the pipeline in one of several ways, and says what is still there."""
    transparency.compare(rank, size, group, "Schedule1F1B", "mlp", 2, 4, True)  # what torch makes at first use
    dist.barrier(group=group)
    before = Belongings()
    for _ in range(2):
        trainee = Trainee("mixed", rank, size, group, "Schedule1F1B", 3, seed=61)
        trainee.step(6)
        trainee.step(7)
        trainee.eval(5)
        schedule = trainee.schedule
        dist.barrier(group=group)  # or else a rank that is still in eval() hears of the failure there
        if fail:
            with contextlib.suppress(pypipe.PipelineError):
                schedule.step(*trainee.batch(1), target=None)
        dist.barrier(group=group)
        if how == "close":
            schedule.close()
        elif how == "with":
            with schedule:
                pass
        del trainee, schedule
        gc.collect()
    dist.barrier(group=group)
    return Belongings().differences(before)


def sockets_end_with_close(rank: int, size: int, group: Any) -> list[str]:
    """close() alone, while the schedule object lives on, ends sockets and threads."""
    transparency.compare(rank, size, group, "Schedule1F1B", "mlp", 2, 4, True)
    dist.barrier(group=group)
    before = Belongings()
    trainee = Trainee("mlp", rank, size, group, "Schedule1F1B", 3, seed=62)
    trainee.step()
    during = Belongings()
    trainee.schedule.close()
    after = Belongings()
    found = []
    if not during.threads:
        found.append("the test looks for the wrong thread")
    if not any("socket:" in link for _, link in set(during.descriptors) - set(before.descriptors)):
        found.append("the test looks for the wrong descriptors")
    for name in ("threads", "python_threads", "sockets"):
        if getattr(after, name) != getattr(before, name):
            found.append(f"{name}: {getattr(before, name)} became {getattr(after, name)}")
    left = [link for link in set(after.descriptors) - set(before.descriptors) if "socket:" in link[1]]
    return found + [f"{link} is still open" for link in left]


def collected_without_close(rank: int, size: int, group: Any) -> list[str]:
    """One rank forgets its schedule; the other one's next step fails at once, and a new pipeline trains."""
    trainee: Trainee | None = Trainee("mlp", rank, size, group, "Schedule1F1B", 2, seed=71)
    assert trainee is not None
    trainee.step()
    found = list(trainee.differences)
    if rank == 0:
        trainee = None
        gc.collect()
    else:
        try:
            trainee.step()
            found.append("a step went through without rank 0")
        except pypipe.PeerLost as error:
            if "rank 0" not in str(error):
                found.append(str(error))
    return found + transparency.compare(rank, size, group, "ScheduleGPipe", "gpt", 2, 4, True)


class Snooping(Dataset[Any]):
    """Rows; and what the worker process that makes them has inherited."""

    def __init__(self, sockets: set[str]) -> None:
        self.sockets = sockets

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        mine = {link for _, link in _descriptors()}
        torch.manual_seed(index)
        return torch.randn(6, dtype=torch.float64), torch.tensor(len(mine & self.sockets)), torch.tensor(os.getpid())


def forked_data_loader(rank: int, size: int, group: Any) -> list[str]:
    """A data loader's worker is forked while the pipeline is up, between two steps, and used across steps."""
    before = _descriptors()
    trainee = Trainee("mlp", rank, size, group, "Schedule1F1B", 2, seed=81)
    trainee.step()
    sockets = {link for _, link in _descriptors() - before if link.startswith("socket:")}
    found = [] if sockets else ["the test found no control sockets"]
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # ranks may have children
    for _ in range(2):
        loader = DataLoader(Snooping(sockets), batch_size=4, num_workers=1, multiprocessing_context="fork")
        for x, inherited, pid in loader:
            if int(pid[0]) == os.getpid():
                found.append("the loader has no worker process")
            if int(inherited.max()):
                found.append(f"the worker has {int(inherited.max())} control sockets open")
            y = torch.tanh(x)
            trainee.schedule.step(x, target=y)
            trainee.loss_fn(unpipelined(trainee.reference, x), y).backward()
        trainee.update()
    trainee.step()
    trainee.update()
    trainee.schedule.close()
    return found + trainee.differences


def die_with_a_living_child(rank: int, size: int, group: Any, pid_file: str) -> str:
    """Rank 1 forks a child, and dies; the child lives on with whatever it inherited."""
    before = _descriptors()
    trainee = Trainee("mlp", rank, size, group, "Schedule1F1B", 2, seed=91)
    trainee.step()
    if rank == 1:
        child = os.fork()
        if child == 0:
            for descriptor, _ in before:  # the test's own pipes must not stay open
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            signal.alarm(60)
            signal.pause()
            os._exit(0)
        with open(pid_file, "w") as file:
            file.write(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        trainee.step()
    except pypipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def train_without_process_group(rank: int, size: int) -> list[str]:
    """Two pipelines, one after the other and both at once, with no process group."""
    assert not dist.is_initialized()
    found = transparency.compare(rank, size, None, "Schedule1F1B", "gpt", 3, 7, True)
    found += in_turn(rank, size, None)
    assert not dist.is_initialized()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    differences = train_without_process_group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    # A process group may come later, for other things.
    if "--then-group" in sys.argv:
        dist.init_process_group("gloo")
        differences += transparency.compare(
            dist.get_rank(), dist.get_world_size(), None, "ScheduleGPipe", "mlp", 2, 4, True
        )
        dist.destroy_process_group()
    print("\n".join(differences) or "equal", flush=True)
