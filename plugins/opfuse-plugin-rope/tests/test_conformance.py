"""The plugin against the contract: with the twins, and in Triton's interpreter with the kernels."""

import pytest

import opfuse
from opfuse.testing import FusionSuite, machine


class TestConformance(FusionSuite):
    plugin = "rope"

    @pytest.fixture(autouse=True)
    def _where_no_kernel_runs(self, request):
        """Twins stand in for the kernels."""
        if machine.is_interpreting() and request.node.originalname == "test_plugin":
            pytest.skip("its processes do not interpret: the other tier has run them")
        with opfuse.options(**{"rope.twins": not machine.is_interpreting()}):
            yield


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
