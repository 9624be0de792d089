"""What runs in the next hour on a GPU, tried without one."""

import checkout  # noqa: F401
import pytest

import opfuse

pytest.importorskip("opfuse_triton")
from benchmarks.ledger import host


def test_only_functions_of_opfuse_count_wherever_the_environment_is(tmp_path):
    place = tmp_path / "opfuse-environment" / "lib" / "site-packages" / "other.py"
    found = {}
    exec(compile("def other():\n    return 0\n", place, "exec"), found)
    calls = host.profiled(lambda: (found["other"](), opfuse.ops.RMSNorm(8).reset_parameters()))
    assert calls and all(name.startswith("opfuse/") for name in calls), calls
