"""Schedules as data: built, lowered, verified, simulated and drawn, without importing torch."""

from .actions import Action, Kind
from .auto import auto
from .bubble import Bubble, split_bubble
from .builders import (
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
from .drawing import grid
from .errors import ProgramError
from .lowering import lower
from .measured import RankTimes, merge_ranks, predict
from .memory import peak_memory
from .programs import Chain, Channel, Link, Program, channel_of
from .simulation import Event, Timeline, simulate
from .stage_actions import add_stage_actions
from .tables import dump_csv, dumps_csv, load_csv, loads_csv
from .verification import Verified, verify

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
