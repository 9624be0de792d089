"""The plugin against the contract."""

import opfuse_linear.fused
import pytest

from opfuse.testing import FusionSuite


class TestConformance(FusionSuite):
    plugin = "linear"

    @pytest.fixture(autouse=True)
    def _even_where_it_does_not_pay(self, monkeypatch, request):
        """A backward fusion that brings nothing on this CPU must give the right numbers all the same."""
        if (
            getattr(request.node, "callspec", None)
            and request.node.callspec.params.get("fusion_check") != "refusals"
        ):
            monkeypatch.setattr(opfuse_linear.fused, "adds_nothing", lambda env: False)
