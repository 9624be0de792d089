"""The plugin against the contract: with the twins, and in Triton's interpreter with the kernels."""

import dataclasses

import pytest

import opfuse
from opfuse.testing import FusionSuite, machine

_DRAWS = "it draws the numbers of Philox for a seed of its own: see test_dropout.py"
_LIMITS = {
    f"{name}: {check}": _DRAWS
    for name in ("dropout", "dropout+add", "dropout+add+norm")
    for check in ("output", "generator")
}


class TestConformance(FusionSuite):
    plugin = "norm"
    limits = _LIMITS

    @pytest.fixture(autouse=True)
    def _where_no_kernel_runs(self, request):
        """Twins stand in for the kernels; on a GPU of one multiprocessor, few programs are interpreted."""
        if not machine.is_interpreting():
            with opfuse.options(**{"norm.twins": True}):
                yield
            return
        if request.node.originalname == "test_plugin":
            pytest.skip("its processes do not interpret: the other tier has run them")
        from opfuse_triton import TARGETS, target

        with target(dataclasses.replace(TARGETS[90], multiprocessors=1)):
            yield


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
