"""An activation of a third party is fused by the plugins that know none but opfuse's own."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

from opfuse.testing import FusionSuite
from opfuse.testing.machine import is_interpreting

HERE = pathlib.Path(__file__).parent
WANTED = "triton", "opfuse_linear", "opfuse_activation", "opfuse_mlp"
MISSING = [name for name in WANTED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(is_interpreting(), reason="starts a process that interprets"),
]


def test_its_lines_are_a_dozen():
    """Without imports, decorators and blank lines."""
    text = (HERE / "strangers" / "softsign.py").read_text(encoding="utf-8")
    body = text[text.index("@triton.jit") :].splitlines()
    assert len([line for line in body if line.strip() and not line.startswith("@")]) <= 12


def test_it_is_fused_everywhere_and_passes_the_kit(tmp_path):
    """Into a product's epilogue, into its gradient with the bias's, and into an MLP."""
    path = os.pathsep.join([str(HERE / "strangers"), *filter(None, sys.path)])
    few = "not test_fusion or (gradients and not unmodified and not MLP)"
    few = "" if FusionSuite.thorough else few
    options = ["-q", "-k", few, "-p", "no:cacheprovider", "-c", str(HERE.parent / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(HERE / "strangers" / "softsign_fused.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"\b(\d+) passed", done.stdout)
    assert int(passed) > (100 if FusionSuite.thorough else 5), done.stdout
