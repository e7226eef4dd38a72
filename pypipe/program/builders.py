"""Builders: functions that make the programs of known schedules; their registry knows them by name."""

# The order of these lines is the order in which names are listed.
# isort: off
from pypipe.program.families.linear import gpipe, naive, one_f_one_b
from pypipe.program.families.looped import interleaved, looped_bfs, interleaved_zero_bubble
from pypipe.program.families.zero_bubble import zb_h1, zb_h2
from pypipe.program.families.v_shaped import zbv
from pypipe.program.families.controllable_memory import v_half, v_min
from pypipe.program.families.bidirectional import dualpipe, dualpipev

# isort: on
from pypipe.program.registry import Builder, build, builder_names, find_builder, register

__all__ = [
    "Builder",
    "build",
    "builder_names",
    "dualpipe",
    "dualpipev",
    "find_builder",
    "gpipe",
    "interleaved",
    "interleaved_zero_bubble",
    "looped_bfs",
    "naive",
    "one_f_one_b",
    "register",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zbv",
]
