"""The script that times configurations of kernels, where it only tries itself."""

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("opfuse_triton", reason="the toolkit for Triton is not installed")
pytest.importorskip("opfuse_loss", reason="the plugin with the losses is not installed")
pytest.importorskip("opfuse_rope", reason="the plugin with the rotations is not installed")

SCRIPT = pathlib.Path(__file__).parent.parent / "benchmarks" / "gpu_kernels.py"


def test_each_configuration_is_timed_and_close_to_the_separate_ops(tmp_path):
    file = tmp_path / "kernels.json"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    kernels = {row["kernel"] for row in rows if row["config"]}
    assert kernels >= {"rope_norm_backward_kernel", "loss_kernel", "gradient_kernel"}
    for row in rows:
        assert row["us"] > 0 and row["off"] < 0.02, row
    assert done.stdout.count("\n") == len(rows) + 2
