"""Measures fusions on this machine, and writes what it found into the tables that plans read."""

from .report import Result, TuningReport
from .tune import tune

__all__ = ["Result", "TuningReport", "tune"]
