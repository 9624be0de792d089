"""What torch itself lacks in some version, as a pytest plugin: ``nox -s torch-2.11`` runs with it.

A test that fails for such a reason, and only for it, is skipped with that reason. Nobody has to say
in each of the tests that compile a chain which torch can. Under another torch they fail.
"""

import re

import pytest
import torch

LIMITS = (  # the first torch without it, what the failure says, and the reason in words
    ((2, 12), "which torch 2.12 and newer take", "its Dynamo takes no module as a constant"),
    (
        (2, 13),
        "Dynamo does not know how to trace the builtin",
        "its Dynamo warns where it gives up",
    ),
    ((2, 13), "how to trace method `pop` of class `tuple`", "its Dynamo takes a list for a tuple"),
    ((2, 12), "Could not run 'aten::_scaled_mm_v2'", "it has no scaled_mm on a CPU"),
    ((2, 15), "['spills registers, ", "its Triton spills registers in one of the kernels"),
    (
        (2, 13),
        "wrap <class 'torch.nn.functional._ScalingType'>",
        "its Dynamo knows no kinds of scales",
    ),
    (
        (2, 13),
        "addmm() got multiple values for argument 'beta'",
        "its addmm on meta keeps the dtype",
    ),
    ((2, 14), "spilled=16, ", "its Triton spills registers in one of the kernels"),
    ((2, 13), "Profiler clears events at the end of each cycle", "its profiler warns of itself"),
)


def reason_for(failure, version=None):
    """Why torch, in this version, is to blame for a failure; None if it is not."""
    version = version or torch.__version__
    for before, text, reason in LIMITS:
        if version < before and text in re.sub(r"\s+", " ", failure):
            return f"torch {version}: {reason}"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed and (reason := reason_for(report.longreprtext)):
        path, line, _ = item.location
        report.outcome, report.longrepr = "skipped", (path, line + 1, f"Skipped: {reason}")
    return report
