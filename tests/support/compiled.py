"""What was compiled before need not be compiled again."""

from __future__ import annotations

import functools
import pathlib

import pytest
from opfuse_triton.checking import verify_report

REPORT = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "kernels.json"


@functools.cache
def _changed(plugin):
    return verify_report(REPORT, plugin)


def skip_if_reported(plugin):
    """Skips a test that compiles kernels, if the report of all kernels is of these, and refuses none."""
    if not _changed(plugin):
        pytest.skip(f"benchmarks/results/{REPORT.name} says of just these kernels how they compile")
