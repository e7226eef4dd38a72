"""Builders: functions that make the programs of known schedules; their registry knows them by name."""

# The order of these lines is the order in which names are listed.
# isort: off
from pypipe.program.builders.linear import gpipe, naive, one_f_one_b
from pypipe.program.builders.looped import interleaved, looped_bfs, interleaved_zero_bubble
from pypipe.program.builders.zero_bubble import zb_h1, zb_h2
from pypipe.program.builders.v_shaped import zbv
from pypipe.program.builders.controllable_memory import v_half, v_min
from pypipe.program.builders.bidirectional import dualpipe, dualpipev

# isort: on
from pypipe.program.builders.registry import Builder, build, builder_names, find_builder, register

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
