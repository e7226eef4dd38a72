"""Planning: which schedule suits a number of ranks, measured times and a memory cap. Imports no torch."""

from .advice import advise
from .comparison import Comparison, Row, compare
from .request import PlanError, Request
from .traffic import DTYPES, Traffic

__all__ = ["DTYPES", "Comparison", "PlanError", "Request", "Row", "Traffic", "advise", "compare"]
