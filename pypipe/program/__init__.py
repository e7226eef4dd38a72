"""Schedules as data: built, lowered, verified, simulated and drawn, without importing torch.

The builders of known schedules are here too, by their functions' names: `gpipe`, `one_f_one_b`, `zbv` and so on.
"""

import pypipe.program.builders  # noqa: F401  registers known builders
from pypipe.program.actions import Action, Kind
from pypipe.program.builders.registry import Builder, build, builder_names, find_builder, register
from pypipe.program.builders.spelling import did_you_mean, spelled
from pypipe.program.csv_files import dump_csv, dumps_csv, load_csv, loads_csv
from pypipe.program.data_parallel import add_stage_actions
from pypipe.program.drawing import grid
from pypipe.program.errors import ProgramError
from pypipe.program.lowering import lower
from pypipe.program.memory import peak_memory
from pypipe.program.preparation import prepare
from pypipe.program.programs import Chain, Channel, Link, Program, channel_of
from pypipe.program.simulation.bubble import Bubble, split_bubble
from pypipe.program.simulation.measured import RankTimes, merge_ranks, predict
from pypipe.program.simulation.timeline import Event, Timeline, simulate
from pypipe.program.slots import copy_channels, count_slots
from pypipe.program.verification.proof import Verified, verify

__all__ = [
    "Action",
    "Bubble",
    "Builder",
    "Chain",
    "Channel",
    "Event",
    "Kind",
    "Link",
    "Program",
    "ProgramError",
    "RankTimes",
    "Timeline",
    "Verified",
    "add_stage_actions",
    "build",
    "builder_names",
    "channel_of",
    "copy_channels",
    "count_slots",
    "did_you_mean",
    "dump_csv",
    "dumps_csv",
    "find_builder",
    "grid",
    "load_csv",
    "loads_csv",
    "lower",
    "merge_ranks",
    "peak_memory",
    "predict",
    "prepare",
    "register",
    "simulate",
    "spelled",
    "split_bubble",
    "verify",
]

# Known builders by their functions' names: a builder's module is the only place where it is written down.
_BUILDERS = {builder.__name__: builder for builder in map(find_builder, builder_names())}
__all__ += list(_BUILDERS)
__all__.sort(key=lambda name: (name.islower(), name))


def __getattr__(name: str) -> Builder:
    if name not in _BUILDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _BUILDERS[name]


def __dir__() -> list[str]:
    return sorted(__all__)
