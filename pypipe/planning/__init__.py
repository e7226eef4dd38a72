"""Planning: which schedule suits a number of ranks, measured times and a memory cap. Imports no torch."""

from pypipe.planning.advice import advise
from pypipe.planning.comparison import Comparison, Row, compare
from pypipe.planning.from_trace import plan_command, plan_options
from pypipe.planning.request import PlanError, Request
from pypipe.planning.traffic import DTYPES, Traffic

__all__ = [
    "DTYPES",
    "Comparison",
    "PlanError",
    "Request",
    "Row",
    "Traffic",
    "advise",
    "compare",
    "plan_command",
    "plan_options",
]
