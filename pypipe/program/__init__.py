"""Schedules as data: built, lowered, verified, simulated and drawn, without importing torch."""

from pypipe.program.actions import Action, Kind
from pypipe.program.builders.auto import auto
from pypipe.program.builders.registered import (
    Builder,
    build,
    builder_names,
    dualpipe,
    dualpipev,
    find_builder,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    naive,
    one_f_one_b,
    register,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zbv,
)
from pypipe.program.drawing import grid
from pypipe.program.errors import ProgramError
from pypipe.program.lowering import lower
from pypipe.program.memory import peak_memory
from pypipe.program.programs import Chain, Channel, Link, Program, channel_of
from pypipe.program.simulation.bubble import Bubble, split_bubble
from pypipe.program.simulation.measured import RankTimes, merge_ranks, predict
from pypipe.program.simulation.simulate import Event, Timeline, simulate
from pypipe.program.stage_actions import add_stage_actions
from pypipe.program.tables import dump_csv, dumps_csv, load_csv, loads_csv
from pypipe.program.verification.verify import Verified, verify

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
    "auto",
    "build",
    "builder_names",
    "channel_of",
    "dualpipe",
    "dualpipev",
    "dump_csv",
    "dumps_csv",
    "find_builder",
    "gpipe",
    "grid",
    "interleaved",
    "interleaved_zero_bubble",
    "load_csv",
    "loads_csv",
    "looped_bfs",
    "lower",
    "merge_ranks",
    "naive",
    "one_f_one_b",
    "peak_memory",
    "predict",
    "register",
    "simulate",
    "split_bubble",
    "v_half",
    "v_min",
    "verify",
    "zb_h1",
    "zb_h2",
    "zbv",
]
