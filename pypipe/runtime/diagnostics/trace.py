"""Traces: what each rank did when, in steps that really ran, put together over the store in which the ranks met."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pypipe.errors import InputError, PipelineError, PipelineTimeout
from pypipe.planning.from_trace import plan_command
from pypipe.program import Action, Bubble, Event, Program, RankTimes, Timeline, merge_ranks, predict, split_bubble
from pypipe.program.drawing import Panel, chrome_trace, html, svg, terminal
from pypipe.runtime.rendezvous.world import World, host_identity

__all__ = ["Trace"]

_VIEWS: dict[str, Callable[..., str]] = {".json": chrome_trace, ".html": html, ".svg": svg}
_PAUSE_SECONDS = 0.005
_MICROSECOND = 1000.0  # of the recorder's nanoseconds


class Trace:
    """What the ranks did in the steps within a `with schedule.trace() as trace:` block.

    Every rank enters the block, around the same steps. At its end each rank puts its own part into the store
    through which the ranks met, so that no rank waits for another there; a rank that then asks for a timeline waits
    for the parts of the others.

    An action begins when the message that it waits for is there, and ends when the next one begins. Times are those
    of the host's clock; on an accelerator they are those of its stream, on which the work runs later.

    Args:
        world: the ranks.
        timeout: seconds to wait for the other ranks' parts.
        become: makes this the pipeline's trace, or nothing again, and returns how many it has had.
        check: raises what is wrong with the pipeline, if anything is.
    """

    def __init__(
        self, world: World, timeout: float, become: Callable[[Trace | None], int], check: Callable[[], None]
    ) -> None:
        self._world = world
        self._timeout = timeout
        self._become = become
        self._number = 0
        self._check = check
        self._key = ""
        self._programs: list[Program] = []
        self._mine: list[list[Event]] = []
        self._timelines: list[Timeline] | None = None
        self._done = False

    @property
    def number(self) -> int:
        """Which of the pipeline's traces this is."""
        return self._number

    def add(self, key: str, program: Program, times: Mapping[Action, tuple[int, int]]) -> None:
        """Notes what this rank did in a step.

        Args:
            key: where in the store the ranks' parts of this trace are.
            program: what ran; its transfers are left out.
            times: start and end of each action, in nanoseconds.
        """
        self._key = key
        self._programs.append(program := program.without_transfers())
        self._mine.append(
            [
                Event(action, times[action][0] / _MICROSECOND, times[action][1] / _MICROSECOND)
                for action in program.ranks[self._world.rank]
            ]
        )

    def __enter__(self) -> Trace:
        if self._done:
            raise PipelineError("this trace has been taken: call trace() again for another one")
        self._number = self._become(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._become(None)
        self._done = True
        if kind is None and self._world.size > 1 and self._mine:
            self._world.store.set(f"{self._key}/{self._world.rank}", json.dumps(self._part()))

    @property
    def timelines(self) -> Sequence[Timeline]:
        """For each step of the block, what all ranks did, in microseconds from the first action of all.

        Clocks of ranks on one host are one. Those of several hosts are compared by the messages between them
        (`pypipe.program.merge_ranks`).

        Raises:
            PipelineError: the block has not ended, or no step ran within it; or another rank traced other steps.
            PipelineTimeout: another rank's part has not come.
        """
        if not self._done:
            raise PipelineError("this trace is still being taken: ask for it after its `with` block")
        if not self._mine:
            raise PipelineError("no step ran to its end within the trace's `with` block, so there is nothing to show")
        if self._timelines is None:
            parts = self._parts()
            counts = [len(part["steps"]) for part in parts]
            if len(set(counts)) > 1:
                listed = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
                raise PipelineError(f"the ranks have traced different numbers of steps ({listed}): trace the same ones")
            self._timelines = [
                merge_ranks(program, [RankTimes(part["host"], _events(part["steps"][step])) for part in parts])
                for step, program in enumerate(self._programs)
            ]
        return self._timelines

    @property
    def timeline(self) -> Timeline:
        """The last step's timeline; see `timelines`."""
        return self.timelines[-1]

    @property
    def bubble(self) -> Bubble:
        """The last step's bubble, divided by cause."""
        return split_bubble(self.timeline)

    @property
    def panels(self) -> list[Panel]:
        """The last step as measured, and as predicted from the measured mean times without transfers."""
        measured, name = self.timeline, self.timeline.program.name
        return [Panel(measured, f"{name}, measured", True), Panel(predict(measured), f"{name}, predicted", True)]

    def text(self, width: int = 100, *, colour: bool = False) -> str:
        """The last step, measured and predicted, as characters (see `pypipe.program.drawing.terminal`).

        The last line is the `pypipe plan` command that compares all schedules for the times that were measured.
        """
        return f"{terminal(*self.panels, width=width, colour=colour)}\n\n{plan_command(self.timeline)}"

    def save(self, path: str | Path) -> None:
        """Writes the last step, measured and predicted, into a file.

        Args:
            path: its ending says what is written: `.json` a Chrome trace, for Perfetto and `pypipe show`; `.html` a
                page with zoom; `.svg` a picture.

        Raises:
            InputError: another ending.
            OSError: the file cannot be written.
        """
        path = Path(path)
        if path.suffix not in _VIEWS:
            raise InputError(f"{path} has no ending of {', '.join(_VIEWS)}: give one, it says what is written")
        path.write_text(_VIEWS[path.suffix](*self.panels), encoding="utf-8")

    def _part(self) -> dict[str, Any]:
        """What the others need of this rank: JSON values."""
        steps = [[[str(event.action), event.start, event.end] for event in events] for events in self._mine]
        # The clock is the kernel's, whatever network namespace the process is in.
        return {"host": host_identity().partition("/")[0], "steps": steps}

    def _parts(self) -> list[dict[str, Any]]:
        world = self._world
        deadline = time.monotonic() + self._timeout
        parts = []
        for rank in range(world.size):
            if rank == world.rank:
                parts.append(self._part())
                continue
            key = f"{self._key}/{rank}"
            while not world.store.check([key]):
                self._check()
                if time.monotonic() >= deadline:
                    raise PipelineTimeout(
                        f"rank {world.rank} waited for rank {rank}'s part of a trace: every rank of the pipeline has "
                        "to enter trace() around the same step, and leave it"
                    )
                time.sleep(_PAUSE_SECONDS)
            parts.append(json.loads(world.store.get(key)))
        return parts


def _events(rows: Sequence[Sequence[Any]]) -> list[Event]:
    return [Event(Action.parse(action), start, end) for action, start, end in rows]
