"""The plugin against the contract."""

import opfuse_loss.chunks
import pytest

from opfuse.ops import _blocks
from opfuse.testing import CHECKS, FusionSuite
from opfuse.testing.machine import is_interpreting

TRITON = {"cross entropy", "log-probabilities"}
"""The fusions that launch kernels in any chain."""


@pytest.mark.costly(0.12, always=("output", "gradients"), each=12)
class TestConformance(FusionSuite):
    plugin = "loss"
    most_rows = 8  # there is a program for each row
    limits = {  # noqa: RUF012
        f"linear+log-probability+loss{kind}: {next(iter(CHECKS))}": (
            "the kit makes no advantages, which take no gradient: test_policy_loss.py has them"
        )
        for kind in ("", ", low rank")
    }

    @pytest.fixture(autouse=True)
    def _few_rows_at_once(self, monkeypatch):
        """A loss in several chunks, of several blocks each."""
        monkeypatch.setattr(opfuse_loss.chunks, "LEAST_ROWS", 45)
        monkeypatch.setattr(opfuse_loss.chunks, "MOST_ROWS", 45)
        monkeypatch.setattr(opfuse_loss.chunks, "LOGITS", 1)
        monkeypatch.setattr(_blocks, "LEAST", 0)
        monkeypatch.setattr(_blocks, "BLOCK", 200)
        monkeypatch.setattr(opfuse_loss.chunks, "CLASSES", 5)

    @pytest.fixture(autouse=True)
    def _interpreted_where_kernels_run(self, request):
        """In the interpreter only what launches kernels."""
        params = getattr(getattr(request.node, "callspec", None), "params", {})
        subject = params.get("subject")
        elsewhere = "plugin_check" in params or (subject and subject.name not in TRITON)
        if is_interpreting() and elsewhere:
            pytest.skip("it launches no kernel, or other tests have its kernels")
